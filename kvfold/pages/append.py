"""Append open blocks to the KV pages of many sequences: allocate pages and compute slot addresses on the host, for a
seal that evicts nothing. A kernel then encodes the slots of all layers, heads and sequences in one launch.

With hundreds of sequences, tens of thousands of heads append at once, so places are worked out on arrays.

    O sequences   E extents of all of them   R extents with room
    N runs: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kvfold.errors import OutOfPages
from kvfold.pages.page_allocation import allocate_pages, defer_extents
from kvfold.pages.places import Ints, Places, SegmentTable, before_in_group
from kvfold.pages.segment import GROWTH, Segment, segment_table
from kvfold.pages.sequence import SequenceCache


class AppendPlan(NamedTuple):
    """Where new slots go: `count_N` of them, from the open block's slot `begin_N` on, behind the first `filled_N` of an
    extent."""

    places: AllPlaces
    extent_N: Ints  # which of `places`
    begin_N: Ints
    count_N: Ints
    filled_N: Ints


def reserve_pages(sequence: SequenceCache) -> SegmentTable:
    """Allocate pages for the committed slots of the open block; returns the tail's page table with room for them.
    OutOfPages leaves the sequence as it was."""
    sequence.reclaim_tail()
    num_slots, tail = sequence.open.committed, sequence.tail
    table = segment_table(tail)
    if table.least_room >= num_slots:
        return table
    try:
        allocate_pages(tail, table, _wanted_pages(tail, table.room_X, num_slots, _spare(table)))
    except OutOfPages:
        allocate_pages(tail, table, _wanted_pages(tail, table.room_X, num_slots, 0))
    return segment_table(tail)


def lacks_room(sequence: SequenceCache) -> bool:
    """Whether the tail needs pages before it can take another open block."""
    return segment_table(sequence.tail).least_room < sequence.open.num_slots


def reserve_ahead(sequence: SequenceCache, num_blocks: int = 0) -> None:
    """Allocate what `reserve_pages` would when the open block is full, and room for at least `num_blocks` more of them
    while half of the arena is free. OutOfPages leaves it to that."""
    tail, table, arena = sequence.tail, segment_table(sequence.tail), sequence.arena
    num_slots, spare = sequence.open.num_slots, _spare(table)
    if num_blocks and 2 * arena.free_bytes > arena.capacity_bytes:
        spare = max(spare, num_blocks * num_slots)
    allocate_pages(tail, table, _wanted_pages(tail, table.room_X, num_slots, spare))


def num_ahead(rooms: Sequence[int]) -> int:
    """Of sequences that have so many steps left, how many must find pages in this one, if those with the fewest go
    first and all steps take about as many."""
    return max((-(-nth // max(room, 1)) for nth, room in enumerate(sorted(rooms), start=1)), default=0)


def _spare(table: SegmentTable) -> int:
    return int(table.length_E.sum()) // (table.places.num_rows * GROWTH)


def _wanted_pages(tail: Segment, room_X: Ints, num_slots: int, spare: int) -> Ints:
    """As Segment.find_room counts them when all layers grow. Heads that would be next get theirs at the same time: one
    seal of many then needs memory."""
    size_L, num_heads = zip(*((layer.page_class.page_size, layer.num_heads) for layer in tail.layers), strict=True)
    size_X = np.repeat(size_L, num_heads)
    soon = min(num_slots, spare)
    missing_X = np.where(room_X < num_slots + soon, num_slots + spare - room_X, 0)
    return np.asarray(-(-missing_X // size_X))


def append_blocks(sequences: Sequence[SequenceCache], tables: Sequence[SegmentTable]) -> AppendPlan:
    """Count the committed slots of the open blocks as sealed; the tails' tables have room for them. The caller writes
    the slots: until then what the new places hold is undefined.

    Where all go on as they did the last time, which most seals do, `extent_N`, `begin_N` and `count_N` are the same
    objects as then.
    """
    counts = [sequence.open.committed for sequence in sequences]
    every = joined_places(tuple(table.places for table in tables))
    last = every.last
    # Nothing has come between, and as many slots go to the same extents again.
    if last is not None and last.tables == tables and last.counts == counts and last.room >= max(counts):
        length_E, (at_N, begin_N, count_N) = last.length_E.copy(), last.taken
        room = last.room - max(counts)
    else:
        length_E = np.concatenate([table.length_E for table in tables])
        at_N, begin_N, count_N = _places_for(counts, every, every.capacity_E - length_E)
        room = int((every.capacity_E[at_N] - length_E[at_N] - count_N).min())
    filled_N = length_E[at_N]
    length_E[at_N] = filled_N + count_N
    after = []
    for sequence, table, count, end in zip(sequences, tables, counts, every.ends, strict=True):
        sequence.sealed_len += count
        mine_E = length_E[end - len(table.length_E) : end]
        after.append(SegmentTable(table.places, mine_E, table.least_room - count))
        defer_extents(sequence.tail, after[-1])
        if count % sequence.tail.group:
            sequence.tail.changes.rise()  # groups that are closed early end their extents: the table no longer holds
    is_one_each = len(at_N) == sum(item.num_rows for item in every.each)
    every.last = _Append(after, counts, length_E, (at_N, begin_N, count_N), room) if is_one_each else None
    return AppendPlan(every, at_N, begin_N, count_N, filled_N)


def _places_for(counts: Sequence[int], every: AllPlaces, room_E: Ints) -> tuple[Ints, Ints, Ints]:
    """So many new slots of every head of each tail: the extents they go to, which of them is the first there, and how
    many."""
    at_R = np.flatnonzero(room_E > 0)
    room_R, row_R = room_E[at_R], every.row_E[at_R]
    begin_R = before_in_group(row_R, room_R)  # older extents are filled first
    take_R = np.minimum(np.array(counts)[every.owner_E[at_R]] - begin_R, room_R)
    taking = np.flatnonzero(take_R > 0)
    return at_R[taking], begin_R[taking], take_R[taking]


class _Append(NamedTuple):
    """An append that gave every head its slots in one extent, as do those that follow it for as long as they fit."""

    tables: list[SegmentTable]  # as it left them
    counts: list[int]
    length_E: Ints
    taken: tuple[Ints, Ints, Ints]  # the first columns of AppendPlan
    room: int  # that is left in the fullest of the extents


@dataclass(eq=False)
class AllPlaces:
    """Places of several tails as one; the same object as long as theirs are."""

    each: tuple[Places, ...]
    owner_E: Ints  # which of the tails
    layer_E: Ints
    head_E: Ints
    row_E: Ints  # among the heads of all
    capacity_E: Ints
    ends: list[int]
    last: _Append | None = None
    derived: dict[str, Any] = field(default_factory=dict)  # by kernels


@lru_cache(maxsize=2)
def joined_places(places: tuple[Places, ...]) -> AllPlaces:
    """Kept, for most seals change lengths only."""
    sizes = [len(item.row_E) for item in places]
    rows_before = np.cumsum([0, *(item.num_rows for item in places[:-1])])
    return AllPlaces(
        places,
        np.repeat(np.arange(len(places)), sizes),
        np.concatenate([item.layer_E for item in places]),
        np.concatenate([item.head_E for item in places]),
        np.concatenate([item.row_E for item in places]) + np.repeat(rows_before, sizes),
        np.concatenate([item.capacity_E for item in places]),
        list(accumulate(sizes)),
    )
