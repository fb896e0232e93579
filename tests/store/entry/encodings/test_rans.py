"""The entropy coder: symbols come back, in as many bits as their frequencies promise; bad streams are found."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.store.entry.encodings.rans import (
    PRECISION,
    ZERO,
    Coded,
    InvalidStream,
    Symbols,
    TableChoice,
    cheapest_table,
    decode,
    encode,
    gaussian_tables,
)


def draw(seed: int, num_steps: int, num_lanes: int) -> tuple[Symbols, TableChoice]:
    """Any symbols by any tables, also by those that fit badly."""
    random = np.random.default_rng(seed)
    table_RL = random.integers(0, gaussian_tables().num_tables, (3, num_lanes), dtype=np.uint8)
    symbols = random.integers(0, 256, (num_steps, num_lanes), dtype=np.uint8)
    return symbols, TableChoice(table_RL, random.integers(0, 3, num_steps))


def beside(plans: list[TableChoice]) -> TableChoice:
    return TableChoice(np.concatenate([plan.table_RL for plan in plans], 1), plans[0].row_T)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_symbols_of_streams_side_by_side_come_back(seed: int, steps: int, lanes: int, num_streams: int) -> None:
    drawn = [draw(seed, steps, lanes)] + [draw(seed + i, steps, lanes) for i in range(1, num_streams)]
    drawn = [(symbols, TableChoice(plan.table_RL, drawn[0][1].row_T)) for symbols, plan in drawn]
    coded = [encode(symbols, plan, gaussian_tables()) for symbols, plan in drawn]
    found = decode(coded, beside([plan for _, plan in drawn]), gaussian_tables())
    assert np.array_equal(found, np.concatenate([symbols for symbols, _ in drawn], 1))


@pytest.mark.parametrize("width", [0.3, 2.0, 30.0])
def test_bits_are_near_the_entropy(width: float) -> None:
    random = np.random.default_rng(0)
    values = np.rint(width * random.standard_normal((2000, 8))).clip(-128, 127)
    symbols = (values + ZERO).astype(np.uint8)
    _, counts = np.unique(symbols, return_counts=True)
    entropy = float(-(counts * np.log2(counts / counts.sum())).sum())
    coded = encode(
        symbols, TableChoice(cheapest_table(symbols)[None], np.zeros(2000, dtype=np.intp)), gaussian_tables()
    )
    assert entropy < 8 * (coded.words.nbytes + coded.states_L.nbytes) < 1.06 * entropy + 8 * 32


def test_tables_are_the_same_everywhere() -> None:
    """Streams of another machine are read by these very frequencies."""
    tables = gaussian_tables()
    assert (tables.num_tables, tables.num_symbols) == (40, 256) and tables.frequency.min() == 1
    assert set(tables.frequency.reshape(40, 256).sum(1).tolist()) == {1 << PRECISION}
    assert hashlib.sha256(tables.frequency.astype("<u4").tobytes()).hexdigest()[:16] == "d3c7b1fcb033d2f1"


def test_streams_that_nobody_wrote_are_found() -> None:
    symbols, plan = draw(7, 20, 5)
    coded = encode(symbols, plan, gaussian_tables())
    for words in (coded.words[:-1], np.append(coded.words, np.uint16(0)), coded.words[:0]):
        with pytest.raises(InvalidStream):
            decode([Coded(coded.states_L, words)], plan, gaussian_tables())
    with pytest.raises(InvalidStream, match="began"):
        decode([Coded(coded.states_L ^ np.uint32(1 << 20), coded.words)], plan, gaussian_tables())
