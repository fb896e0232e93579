"""Every chunker covers any text in order; sizes, overlaps, topics and vectors by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.policy.registry import load_variants, terms
from kvfold.shortening.base import Chunker, Task, Unit
from kvfold.shortening.chunkers.fixed import Fixed
from kvfold.shortening.chunkers.grouping import cut_evenly
from kvfold.shortening.chunkers.late import Late, mix, pooled
from kvfold.shortening.chunkers.passages import Passages
from kvfold.shortening.chunkers.semantic import Semantic, boundaries, gap_cosines
from kvfold.shortening.embedders.codes import SCALE
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.parts import parts_of
from kvfold.shortening.tokens import TokenOffsets
from tests.shortening.texts import MARKDOWN, PROSE, TEXTS, texts

load_variants()
CHUNKERS: list[Chunker] = [term.variant() for term in terms("units")]
SMALL = [Fixed(size=5, overlap=0.4), Fixed(size=1, overlap=0.0), Passages(size=6), Semantic(size=6), Late(size=6)]


def units_of(chunker: Chunker, text: str) -> tuple[Unit, ...]:
    return chunker.units(text, parts_of(text), HashedTfIdf(), TokenOffsets.of(text))


def pieces(chunker: Chunker, text: str) -> list[str]:
    return [text[unit.start : unit.end] for unit in units_of(chunker, text)]


@pytest.mark.parametrize("chunker", [*CHUNKERS, *SMALL], ids=str)
@given(text=texts())
def test_units_cover_the_text_in_order(chunker: Chunker, text: str) -> None:
    units = units_of(chunker, text)
    if not text.strip():
        assert "".join(text[unit.start : unit.end] for unit in units) in ("", text)
        return
    assert units[0].start == 0 and units[-1].end == len(text)
    assert all(unit.start < unit.end for unit in units)
    for before, after in pairwise(units):
        assert before.start < after.start <= before.end < after.end


@pytest.mark.parametrize("chunker", [*CHUNKERS, *SMALL], ids=str)
@pytest.mark.parametrize("text", TEXTS[:6], ids=lambda text: text[:12])
def test_units_have_vectors(chunker: Chunker, text: str) -> None:
    units, tokens = units_of(chunker, text), TokenOffsets.of(text)
    parts = parts_of(text)
    kept_n = np.zeros(len(parts), dtype=bool)
    task = Task(text, units, parts, kept_n, tokens, 0, None, HashedTfIdf(), chunker=chunker)
    assert task.codes_ND.shape == (len(units), 1024) and task.codes_ND.dtype == np.int8


@pytest.mark.parametrize("chunker", (Passages(size=24), Semantic(size=24), Late(size=24)), ids=str)
@pytest.mark.parametrize("text", (PROSE, MARKDOWN))
def test_only_a_long_sentence_exceeds_the_size(chunker: Chunker, text: str) -> None:
    tokens = TokenOffsets.of(text)
    for unit in units_of(chunker, text):
        assert unit.kind != "chunk" or tokens.count(unit.start, unit.end) <= 24


@pytest.mark.parametrize("chunker", (Passages(), Semantic(), Late()), ids=str)
def test_headings_and_code_stand_alone(chunker: Chunker) -> None:
    found = {unit.kind: MARKDOWN[unit.start : unit.end].strip() for unit in reversed(units_of(chunker, MARKDOWN))}
    assert found["heading"] == "# Install"
    assert found["code"].startswith("```sh") and found["code"].endswith("```")


def test_fixed_by_hand() -> None:
    text = "a b c d e f g h i j"
    assert pieces(Fixed(4, 0.0), text) == ["a b c d ", "e f g h ", "i j"]
    assert pieces(Fixed(4, 0.25), text) == ["a b c d ", "d e f g ", "g h i j"]
    assert pieces(Fixed(4, 0.5), text) == ["a b c d ", "c d e f ", "e f g h ", "g h i j"]
    assert pieces(Fixed(10, 0.5), text) == [text]
    assert pieces(Fixed(9, 0.0), text) == ["a b c d e f g h i ", "j"]


def test_fixed_takes_tokens_of_one_character_together() -> None:
    text = "a 🚢 b"
    tokens = TokenOffsets(np.array([0, 1, 2, 2, 4]))  # as byte-level tokenizers report
    units = Fixed(2, 0.0).units(text, parts_of(text), HashedTfIdf(), tokens)
    assert [text[unit.start : unit.end] for unit in units] == ["a ", "🚢 ", "b"]
    units = Fixed(2, 0.5).units(text, parts_of(text), HashedTfIdf(), tokens)
    assert [text[unit.start : unit.end] for unit in units] == ["a ", "🚢 ", "b"]


def test_fixed_cuts_no_word_but_one_without_an_end() -> None:
    text = "Introductions were extraordinarily formal. 港口结冰。"
    for size in (1, 2, 3):
        words = [word for piece in pieces(Fixed(size, 0.0), text) for word in piece.split()]
        assert words[:4] == text.split()[:4]
    assert pieces(Fixed(1, 0.0), "港口结") == ["港", "口", "结"]
    assert pieces(Fixed(2, 0.0), "a" * 320) == ["a" * 16] * 20


def test_passages_by_hand() -> None:
    first, second, third = PROSE.split("\n\n")
    assert pieces(Passages(size=40), PROSE) == [first + "\n\n", second + "\n\n", third]
    assert pieces(Passages(), PROSE) == [f"{first}\n\n{second}\n\n", third]
    assert pieces(Passages(size=1000), PROSE) == [PROSE]  # paragraphs of together at most half the size are one
    halves = pieces(Passages(size=24), PROSE.split("\n\n")[1])
    assert halves == [
        "Mayor Ines Okafor asked the coast guard for an icebreaker. It came on 4 February, from Oslo. ",
        "The first ship to leave was the Vega, with grain for Tunis.",
    ]


def test_cuts_are_even() -> None:
    before = np.array([0, 10, 20, 30, 40])
    assert list(cut_evenly(0, 4, before, 40)) == [(0, 4)]
    assert list(cut_evenly(0, 4, before, 39)) == [(0, 2), (2, 4)]
    assert list(cut_evenly(0, 4, before, 10)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(cut_evenly(0, 4, before, 3)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(cut_evenly(0, 3, np.array([0, 1, 2, 100]), 50)) == [(0, 2), (2, 3)]
    assert list(cut_evenly(1, 3, np.array([0, 9, 9, 100]), 50)) == [(1, 2), (2, 3)]


def test_a_topic_ends_where_vectors_part() -> None:
    codes = np.zeros((6, 2), dtype=np.int8)
    codes[:3, 0] = codes[3:, 1] = SCALE
    gaps = gap_cosines(codes, 3)
    assert gaps[2] == 0 and all(gaps[[0, 1, 3, 4]] > 0)
    assert np.flatnonzero(boundaries(codes, 3, 0.3)).tolist() == [3]
    assert not boundaries(codes[:2], 3, 0.3).any()
    assert np.array_equal(gap_cosines(codes, 1), [1, 1, 0, 1, 1])


def test_gaps_are_alike_in_blocks_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (23, 8)).astype(np.int8)
    whole, mixed = gap_cosines(codes, 3), pooled(codes, np.array([0, 4, 5, 17]), 0.5)
    monkeypatch.setattr("kvfold.shortening.chunkers.semantic._BLOCK", 5)
    monkeypatch.setattr("kvfold.shortening.chunkers.late._BLOCK", 5)
    assert np.array_equal(gap_cosines(codes, 3), whole)
    assert np.array_equal(pooled(codes, np.array([0, 4, 5, 17]), 0.5), mixed)


def test_semantic_units_of_two_topics() -> None:
    cats = [f"The cat sat on mat {name} and the cat purred." for name in ("one", "two", "three", "four")]
    rates = [f"Interest rates of bank {name} rose and the bank lent less." for name in ("five", "six", "seven")]
    found = pieces(Semantic(), " ".join([*cats, *rates]))
    assert " ".join(rates) in found


def test_sentences_take_shares_of_their_neighbours() -> None:
    codes = np.array([[100, 0], [0, 100], [0, 0]], dtype=np.int8)
    assert np.array_equal(mix(codes, 0, 3, 0.5), [[100, 50], [50, 100], [25, 50]])
    assert np.array_equal(mix(codes, 1, 2, 0.5), [[50, 100]])
    assert np.array_equal(pooled(codes, np.array([0, 1]), 0.0), [[127, 0], [0, 127]])
    assert np.array_equal(pooled(codes, np.array([0]), 0.5), [[round(127 * 175 / np.hypot(175, 200)), 96]])


@pytest.mark.parametrize(
    ("units", "message"),
    (
        ("fixed(0)", "size is at least 1 token, not 0"),
        ("fixed(9, overlap=1)", "overlap is a share from 0 to below 1, not 1"),
        ("passages(0)", "size is at least 1 token, not 0"),
        ("semantic(window=0)", "size and window are at least 1, not 256 and 0"),
        ("semantic(share=0)", "share is above 0 and at most 1, not 0"),
        ("late(share=2)", "share is from 0 to 1, not 2"),
    ),
)
def test_arguments_out_of_range_are_refused(units: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.parse(f"shorten(graph, 4x, units={units})")
