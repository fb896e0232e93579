"""Make room for blocks of new slots behind every head and say where each slot goes: the host's part of a seal that
evicts nothing. A kernel then encodes the slots of all layers, heads and sequences in one launch.

With hundreds of sequences, tens of thousands of heads append at once, so places are worked out on arrays.

    O sequences   E extents of all of them   F address columns of pages/table.py
    N stretches: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvfold.errors import OutOfPages
from kvfold.pages.grow import give_pages, put_off
from kvfold.pages.segment import GROWTH, Segment
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import Ints, SegmentTable, segment_table


class Stretches(NamedTuple):
    """`count_N` new slots from the open block's slot `begin_N` on, and the byte addresses of their places."""

    owner_N: Ints  # which of the sequences
    layer_N: Ints
    head_N: Ints
    begin_N: Ints
    count_N: Ints
    address_NF: Ints


def make_room(sequence: SequenceCache) -> None:
    """Find pages for the committed slots of the open block. OutOfPages leaves the sequence as it was."""
    sequence.reclaim_tail()
    num_slots, tail = sequence.open.committed, sequence.tail
    table = segment_table(tail)
    if table.least_room >= num_slots:
        return
    spare = int(table.length_E.sum()) // (table.places.num_rows * GROWTH)
    try:
        give_pages(tail, table, _wanted_pages(tail, table.room_X, num_slots, spare))
    except OutOfPages:
        give_pages(tail, table, _wanted_pages(tail, table.room_X, num_slots, 0))


def _wanted_pages(tail: Segment, room_X: Ints, num_slots: int, spare: int) -> Ints:
    """As Segment.find_room counts them when all layers grow. Heads that would be next get theirs at the same time: one
    seal of many then needs memory."""
    size_L, num_heads = zip(*((layer.page_class.page_size, layer.num_heads) for layer in tail.layers), strict=True)
    size_X = np.repeat(size_L, num_heads)
    soon = min(num_slots, spare)
    missing_X = np.where(room_X < num_slots + soon, num_slots + spare - room_X, 0)
    return np.asarray(-(-missing_X // size_X))


def append_blocks(sequences: Sequence[SequenceCache]) -> Stretches:
    """Count the committed slots of the open blocks as sealed; there is room for them, a slot of their codecs needs no
    neighbours. The caller writes the slots: until then what the new places hold is undefined."""
    tables = [segment_table(sequence.tail) for sequence in sequences]
    counts = [sequence.open.committed for sequence in sequences]
    sizes = [len(table.length_E) for table in tables]
    owner_E = np.repeat(np.arange(len(tables)), sizes)
    layer_E, head_E, row_E, capacity_E = (
        np.concatenate([getattr(table.places, name) for table in tables])
        for name in ("layer_E", "head_E", "row_E", "capacity_E")
    )
    length_E = np.concatenate([table.length_E for table in tables])
    begin_E = _room_before(owner_E, row_E, capacity_E - length_E)
    take_E = np.clip(np.array(counts)[owner_E] - begin_E, 0, capacity_E - length_E)
    (at_N,) = take_E.nonzero()
    stride_OLF = np.stack([table.places.stride_LF for table in tables])
    address_EF = np.concatenate([table.places.address_EF for table in tables])
    owner_N, layer_N, count_N = owner_E[at_N], layer_E[at_N], take_E[at_N]
    address_NF = address_EF[at_N] + length_E[at_N, None] * stride_OLF[owner_N, layer_N]
    after_E = length_E + take_E
    for sequence, table, count, end in zip(sequences, tables, counts, accumulate(sizes), strict=True):
        sequence.sealed_len += count
        mine_E = after_E[end - len(table.length_E) : end]
        put_off(sequence.tail, SegmentTable(table.places, mine_E, table.least_room - count))
    return Stretches(owner_N, layer_N, head_E[at_N], begin_E[at_N], count_N, address_NF)


def _room_before(owner_E: Ints, row_E: Ints, room_E: Ints) -> Ints:
    """Room in older extents of the same head: new slots fill those first."""
    before_E = np.cumsum(room_E) - room_E
    is_first_E = np.ones(len(room_E), dtype=bool)
    is_first_E[1:] = (np.diff(owner_E) != 0) | (np.diff(row_E) != 0)
    return before_E - np.maximum.accumulate(np.where(is_first_E, before_E, 0))
