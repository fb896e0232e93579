"""Where closed-up keys appear, and the pieces that tasks are cut from: against every slot's own distance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvfold.pages.places import COLUMNS
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured import position_shifts
from kvfold.passes.captured.position_shifts import PositionShifts, shifts_of, stored_tables
from kvfold.passes.captured.split_kv import LaneTables, cut, pieces_of
from tests.attend.kernels.common import DEVICE
from tests.attend.reference import part
from tests.attend.test_paged import mixed
from tests.pages.tiny import fill, new_sequence, prefill, random_layers, tiny_spec

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="fills sequences on the CPU")
PROTECT = "protect(sinks=3, recent=4)"
SPEC = tiny_spec(num_layers=2, num_heads=3, head_dim=32)


def shifts(sequence: SequenceCache) -> list[list[int]]:
    """Of every slot, head by head, as the definition says."""
    found = []
    for layer, spec in enumerate(sequence.spec.layers):
        for head in range(spec.num_kv_heads):
            positions = sequence.positions(layer, head)[: sequence.stored_lens(layer)[head]]
            first = sequence.sealed_len - len(positions)
            found.append((first + torch.arange(len(positions)) - positions).tolist())
    return found


def known(sequence: SequenceCache) -> PositionShifts:
    gaps = shifts_of(sequence)
    assert gaps is not None
    return gaps


@pytest.fixture(params=["native", "int8", "kivi4"])
def gappy(request: pytest.FixtureRequest) -> Iterator[SequenceCache]:
    """Two segments and a tail of unequal heads, with gaps all over."""
    yield mixed(request.param, SPEC, random_layers(SPEC, 100), position="slot")


def test_every_slot_gets_its_distance(gappy: SequenceCache) -> None:
    gaps, want = known(gappy), shifts(gappy)
    for row, mine in enumerate(want):
        at = np.flatnonzero(gaps.row_N == row)
        ends = [*gaps.slot_N[at][1:], len(mine)]
        found = [shift for i, end in zip(at, ends, strict=True) for shift in [gaps.shift_N[i]] * (end - gaps.slot_N[i])]
        assert found == mine
        assert gaps.table(32)[row, : len(at)].tolist() == gaps.shift_N[at].tolist()
    assert gaps.most > 2 and known(gappy) is gaps


def test_tasks_cover_every_slot_once_with_its_distance(gappy: SequenceCache) -> None:
    gaps, want = known(gappy), shifts(gappy)
    tasks = cut([LaneTables(0, stored_tables(gappy), gaps)], np.array([128, 128]))
    seen: dict[tuple[int, int], int] = {}
    table_XV = gaps.table(gaps.most)
    for layer, head, first, skip, length, shift_id in zip(
        tasks.layer_N, tasks.head_N, tasks.first_N, tasks.skip_N, tasks.length_N, tasks.shift_id_N, strict=True
    ):
        row = int(layer) * 3 + int(head)
        assert skip < length and skip < gaps.unit_X[row]
        for slot in range(first + skip, first + length):
            assert want[row][slot] == table_XV[row, shift_id]
            seen[row, slot] = seen.get((row, slot), 0) + 1
    assert seen == {(row, slot): 1 for row, mine in enumerate(want) for slot in range(len(mine))}


@pytest.mark.parametrize("codec", ["native", "int8", "int4"])
def test_pieces_begin_at_aligned_addresses(codec: str) -> None:
    sequence = new_sequence(f"streaming(sinks=3) + 40tok + slot + {codec} + {PROTECT}", SPEC, page_size=16, open_len=8)
    prefill(sequence, part(random_layers(SPEC, 100), 0, 100))
    pieces = pieces_of(stored_tables(sequence), known(sequence))
    assert (pieces.address_PF[:, : len(COLUMNS)] % 16 == 0).all()
    assert pieces.skip_P.tolist() == [0, 3] * 6 and pieces.length_P.tolist() == [3, 32] * 6


def test_without_gaps_the_device_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = new_sequence("full + slot", SPEC, page_size=16)
    assert known(sequence).most == 1
    fill(sequence, 40)
    monkeypatch.setattr(position_shifts, "_positions", None)
    gaps = known(sequence)
    assert gaps.most == 1 and not gaps.shift_N.any() and len(gaps.row_N) == 6


def test_too_many_distances_are_no_moves(gappy: SequenceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    most = known(gappy).most
    gappy.derived.clear()
    monkeypatch.setattr(position_shifts, "MAX_SHIFTS", most - 1)
    assert shifts_of(gappy) is None
