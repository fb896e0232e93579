"""Cut what sequences have stored into tasks of even work.

A *lane* is a place in the batch of a decode step. A *task* is a stretch of at most `split` slots of one head, adjacent
in memory. Splitting by slots, not by heads, gives every processor the same work although heads differ in length.

    N tasks   E extents   L layers   F address columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import Ints, SegmentTable, segment_table

_ALIGNMENT = 128  # slots: tasks begin at multiples, so that tiles and groups of slots are whole


class Part(NamedTuple):
    """What is stored for one lane."""

    lane: int
    tables: tuple[SegmentTable, ...]


class Tasks(NamedTuple):
    """Tasks of some lanes: lane by lane, layer by layer, head by head, oldest slots first."""

    lane_N: Ints
    layer_N: Ints
    head_N: Ints
    nth_N: Ints  # among the tasks of its lane and layer
    length_N: Ints
    address_NF: Ints
    last_E: Ints  # the last task of each extent, in the order of the tables; of no use where an extent is empty

    @property
    def most(self) -> int:
        """Tasks of the fullest layer of any lane."""
        return int(self.nth_N.max(initial=-1)) + 1


def stored_tables(sequence: SequenceCache) -> tuple[SegmentTable, ...]:
    """What a lane is made of; the same objects until slots or pages change."""
    return tuple(segment_table(segment) for segment in (*sequence.segments, sequence.tail))


def choose_splits(tables: Sequence[SegmentTable], tasks_L: Ints) -> Ints:
    """Slots per task of each layer, so that it has at most `tasks_L` tasks, or the least multiple that heads allow.

    A processor with one task more than the others is waited for; so tasks that begin an extent are counted in.
    """
    slots_L, extents_L = np.zeros_like(tasks_L), np.zeros_like(tasks_L)
    for table in tables:
        layer_E = table.places.layer_E
        slots_L += np.bincount(layer_E, table.length_E, len(tasks_L)).astype(np.int64)
        extents_L += np.bincount(layer_E, table.length_E > 0, len(tasks_L)).astype(np.int64)
    rounds_L = np.maximum(1, -(-2 * extents_L // tasks_L))
    pieces_L = rounds_L * tasks_L - extents_L
    return np.asarray(np.maximum(1, -(-slots_L // (pieces_L * _ALIGNMENT))) * _ALIGNMENT)


def num_pieces(length_E: Ints, split_E: Ints) -> Ints:
    """Tasks of each extent."""
    return -(-length_E // split_E)


def cut(parts: Sequence[Part], split_L: Ints) -> Tasks:
    """Cut every extent of every lane."""
    tables = [table for part in parts for table in part.tables]
    lanes = [part.lane for part in parts for _ in part.tables]
    lane_E = np.repeat(np.array(lanes), [len(table.length_E) for table in tables])
    layer_E, head_E, address_EF = (
        np.concatenate([getattr(table.places, name) for table in tables])
        for name in ("layer_E", "head_E", "address_EF")
    )
    length_E = np.concatenate([table.length_E for table in tables])
    row_E = (lane_E * len(split_L) + layer_E) * (head_E.max(initial=0) + 1) + head_E
    order_E = np.argsort(row_E, kind="stable")  # a head's extents stay oldest first
    pieces_E = num_pieces(length_E, split_L[layer_E])[order_E]
    end_E = np.cumsum(pieces_E)
    of_N = np.repeat(order_E, pieces_E)
    layer_N, lane_N = layer_E[of_N], lane_E[of_N]
    begin_N = (np.arange(len(of_N)) - np.repeat(end_E - pieces_E, pieces_E)) * split_L[layer_N]
    last_E = np.empty_like(end_E)
    last_E[order_E] = end_E - 1
    return Tasks(
        lane_N,
        layer_N,
        head_E[of_N],
        _place_in_group(lane_N * len(split_L) + layer_N),
        np.minimum(length_E[of_N] - begin_N, split_L[layer_N]),
        address_EF[of_N] + begin_N[:, None] * tables[0].places.stride_LF[layer_N],
        last_E,
    )


def _place_in_group(group_N: Ints) -> Ints:
    """0, 1, 2 … in each stretch of equal numbers."""
    place_N = np.arange(len(group_N))
    is_first_N = np.diff(group_N, prepend=-1) != 0
    return place_N - np.maximum.accumulate(np.where(is_first_N, place_N, 0))
