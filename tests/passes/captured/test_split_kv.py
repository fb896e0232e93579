"""Tasks: as many as processors want, never one round more for a few."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.pages.places import Places, SegmentTable
from kvfold.passes.captured.split_kv import LaneTables, choose_splits, cut


def table(lens: list[list[int]]) -> SegmentTable:
    """One extent for each head, `lens[layer][head]`; addresses say nothing."""
    flat = [(layer, head, length) for layer, heads in enumerate(lens) for head, length in enumerate(heads)]
    layer_E, head_E, length_E = (np.array(column) for column in zip(*flat, strict=True))
    row_E = np.arange(len(flat))
    address_EF, stride_LF = np.zeros((len(flat), 7), dtype=np.int64), np.ones((len(lens), 7), dtype=np.int64)
    places = Places(layer_E, head_E, row_E, length_E, address_EF, stride_LF, (layer_E, head_E))
    return SegmentTable.of(places, length_E)


@pytest.mark.parametrize("num_tasks", [4, 128, 528])
@pytest.mark.parametrize("lens", [[[40_000, 3, 700, 9_000], [128] * 4], [[1, 0, 0, 0], [200_000] * 4]])
def test_a_layer_has_no_more_tasks_than_wanted_unless_heads_force_it(lens: list[list[int]], num_tasks: int) -> None:
    split_L = choose_splits([table(lens)], np.array([num_tasks] * len(lens)))
    counts = np.bincount(cut([LaneTables(0, (table(lens),))], split_L).layer_N, minlength=len(lens))
    for count, heads, split in zip(counts.tolist(), lens, split_L.tolist(), strict=True):
        used = sum(length > 0 for length in heads)
        rounds = max(1, -(-2 * used // num_tasks))
        assert used <= count <= rounds * num_tasks
        assert split % 128 == 0
        assert split == 128 or sum(-(-length // (split - 128)) for length in heads) > rounds * num_tasks - 2 * used


def test_lanes_share_the_tasks_of_a_layer() -> None:
    tables = [table([[5_000, 60_000]]), table([[9_000, 100]])]
    split_L = choose_splits(tables, np.array([64]))
    parts = [LaneTables(lane, (item,)) for lane, item in enumerate(tables)]
    tasks = cut(parts, split_L)
    assert 32 < len(tasks.lane_N) <= 64
    assert tasks.length_N.sum() == 74_100


def test_slots_that_are_read_elsewhere_are_skipped_once_and_need_no_task_of_their_own() -> None:
    tables = (table([[4, 4, 300], [9, 4, 1]]), table([[7, 0, 5], [0, 6, 2]]))
    tasks = cut([LaneTables(0, tables, sinks_L=np.array([4, 0]))], np.array([128, 128]))
    columns = (tasks.layer_N, tasks.head_N, tasks.length_N, tasks.skip_N)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == [
        (0, 0, 7, 0),
        (0, 2, 128, 4), (0, 2, 128, 0), (0, 2, 44, 0), (0, 2, 5, 0),
        (1, 0, 9, 0),
        (1, 1, 4, 0), (1, 1, 6, 0),
        (1, 2, 1, 0), (1, 2, 2, 0),
    ]  # fmt: skip
