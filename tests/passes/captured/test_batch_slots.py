"""Lanes that follow their sequences hold what lanes made anew would hold; a seal sends lengths, not whole lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvfold.attend.kernels.formats import LENGTH
from kvfold.compression.seal import seal
from kvfold.pages.append import reserve_ahead
from kvfold.pages.arena import Arena
from kvfold.pages.places import Ints
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.batch_slots import BatchSlots, OutOfBatchSlots
from kvfold.passes.captured.split_kv import Tasks
from kvfold.passes.captured.step import layout_of
from tests.attend.kernels.common import DEVICE
from tests.pages.test_append import append, waiting
from tests.pages.tiny import fill, new_sequence, tiny_spec

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="fills sequences on the CPU")
SPEC = tiny_spec(num_layers=3, num_heads=2)
WIDER = tiny_spec(num_layers=3, num_heads=2, head_dim=32)
Rows = list[list[int]]


def make(arena: Arena, *lengths: int) -> list[SequenceCache]:
    found = [new_sequence("full", SPEC, arena=arena, page_size=16, open_len=8) for _ in lengths]
    for sequence, length in zip(found, lengths, strict=True):
        fill(sequence, length)
    return found


def make_lanes(sequences: Sequence[SequenceCache], num_lanes: int = 4) -> BatchSlots:
    layout = layout_of(sequences[0])
    assert layout is not None
    return BatchSlots(layout, sequences, num_lanes)


def rows(lanes: BatchSlots, lane: int) -> list[list[Rows]]:
    """Tasks of every layer and head, without the columns that depend on the lane's number."""
    found = []
    for task_BC, range_BH in zip(lanes.tables.task_LBC, lanes.tables.rows_LBH, strict=True):
        flat = task_BC.flatten(0, 1)
        found.append([flat[first:last, LENGTH:].tolist() for first, last in range_BH[lane].tolist()])
        assert int(task_BC[lane, :, LENGTH].sum()) == sum(row[0] for head in found[-1] for row in head)
    return found


def check(lanes: BatchSlots, sequences: Sequence[SequenceCache]) -> None:
    where = lanes.place(sequences)
    for lane, sequence in zip(where, sequences, strict=True):
        anew = make_lanes([sequence])
        anew.split_L = lanes.split_L
        anew.place([sequence])
        assert rows(lanes, lane) == rows(anew, 0)
        assert torch.equal(lanes.open_LB2[:, lane], anew.open_LB2[:, 0])
    for lane in set(range(lanes.num_lanes)) - set(where):
        assert not lanes.tables.task_LBC[:, lane].any() and not lanes.tables.rows_LBH[:, lane].any()


def test_lanes_follow_seals_forks_and_changes_of_the_batch() -> None:
    arena = Arena(8 << 20)
    sequences = make(arena, 20, 100, 126)
    lanes = make_lanes(sequences)
    sequences[0].tail.reserve([[200, 200]] * 3)  # an extent that will take two tasks of 128 slots
    for number in range(24):
        for i, sequence in enumerate(sequences):
            waiting(sequence, 8 - i)
        append(sequences[:2])
        seal(sequences[2])
        check(lanes, sequences if number % 3 else sequences[1:])
    branch = sequences[0].fork()
    check(lanes, [*sequences, branch])
    sequences.pop(1).release()
    check(lanes, [branch, *sequences])
    for sequence in (branch, *sequences):
        sequence.release()


def test_lanes_that_always_grow_by_as_much_pass_borders_between_tasks() -> None:
    sequences = make(Arena(8 << 20), 16, 96)
    for sequence in sequences:
        sequence.tail.reserve([[200, 200]] * 3)
    lanes = make_lanes(sequences)
    for _ in range(24):
        for sequence in sequences:
            waiting(sequence, 8)
        append(sequences)
        check(lanes, sequences)
    for sequence in sequences:
        sequence.release()


def test_slots_that_are_gone_leave_no_tasks_behind() -> None:
    sequences = make(Arena(8 << 20), 300, 40)
    lanes = make_lanes(sequences)
    check(lanes, sequences)
    for layer in sequences[0].tail.layers:
        layer.truncate()
    check(lanes, sequences)
    assert not lanes.tables.task_LBC[:, 0, :, LENGTH].any()
    for sequence in sequences:
        sequence.release()


def test_a_seal_into_pages_with_room_sends_lengths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make(Arena(8 << 20), 20, 36)  # 12 slots are free in each last page
    lanes = make_lanes(sequences)
    lanes.place(sequences)
    written: list[Sequence[int]] = []
    put = lanes.tables.put

    def noted(which: Sequence[int], tasks: Tasks) -> Ints:
        written.append(which)
        return put(which, tasks)

    monkeypatch.setattr(lanes.tables, "put", noted)
    for _ in range(3):
        for sequence in sequences:
            waiting(sequence, 4)
        append(sequences)
        check(lanes, sequences)
    assert not written
    waiting(sequences[1], 1)
    append(sequences[1:])
    check(lanes, sequences)
    assert written == [[1]]
    reserve_ahead(sequences[0])
    check(lanes, sequences)
    assert written == [[1], [0]]
    for num_slots in (4, 3):
        waiting(sequences[0], num_slots)
        append(sequences[:1])
        check(lanes, sequences)
    assert written == [[1], [0]]
    for sequence in sequences:
        sequence.release()


def test_the_longest_tasks_of_narrow_codes_begin_first() -> None:
    arena = Arena(8 << 20)
    sequences = [new_sequence("int4", WIDER, arena=arena, page_size=16, open_len=8) for _ in range(3)]
    for sequence, length in zip(sequences, (40, 300, 100), strict=True):
        fill(sequence, length)
    lanes = make_lanes(sequences)
    check_order(lanes, sequences)
    lengths_P = lanes.tables.task_LBC[1].flatten(0, 1)[:, LENGTH][lanes.tables.order(1)]
    assert lengths_P[0] == 128 and lengths_P.diff().max() <= 0
    for _ in range(20):
        for sequence in sequences:
            waiting(sequence, 8)
            reserve_ahead(sequence)
        append(sequences)
        check_order(lanes, sequences)
    check_order(lanes, sequences[1:])
    for sequence in sequences:
        sequence.release()


def check_order(lanes: BatchSlots, sequences: Sequence[SequenceCache]) -> None:
    lanes.place(sequences)
    for layer, task_BC in enumerate(lanes.tables.task_LBC):
        order_P, length_N = lanes.tables.order(layer), task_BC.flatten(0, 1)[:, LENGTH]
        assert order_P is not None and len(order_P.unique()) == len(order_P)
        assert length_N[order_P].sum() == length_N.sum()


def test_many_lanes_have_programs_for_little_more_than_their_tasks() -> None:
    arena = Arena(64 << 20)
    sequences = [new_sequence("int4", WIDER, arena=arena, page_size=16, open_len=8) for _ in range(20)]
    for sequence in sequences:
        fill(sequence, 64)
    lanes = make_lanes(sequences, 33)
    check_order(lanes, sequences)
    order_P = lanes.tables.order(0)
    assert order_P is not None and 2 * 33 < len(order_P) < 33 * lanes.tables.capacity
    for _ in range(3):
        for sequence in sequences:
            reserve_ahead(sequence)
            waiting(sequence, 8)
        lanes.place(sequences)  # with tasks for the new pages, which have no slots yet
        append(sequences)
        check_order(lanes, sequences)
    for sequence in sequences:
        fill(sequence, 600)  # five tasks of 128 slots in place of one
    with pytest.raises(OutOfBatchSlots):
        lanes.place(sequences)
    for sequence in sequences:
        sequence.release()


def test_wide_codes_begin_as_they_lie() -> None:
    (sequence,) = make(Arena(8 << 20), 40)
    assert make_lanes([sequence]).tables.order(0) is None
    sequence.release()
