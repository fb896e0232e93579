"""Make room for blocks of new slots behind every head and say where each slot goes: the host's part of a seal that
evicts nothing. A kernel then encodes the slots of all layers, heads and sequences in one launch.

With hundreds of sequences, tens of thousands of heads append at once, so places are worked out on arrays.

    O sequences   E extents of all of them   F address columns of pages/table.py
    N stretches: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from kvfold.errors import OutOfPages
from kvfold.pages.segment import GROWTH, Segment, Wanted
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import Ints, SegmentTable, remember, segment_table


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
    try:
        room = tail.find_pages(_wanted_pages(tail, num_slots - table.room_X, table.length_X // GROWTH))
    except OutOfPages:
        room = tail.find_pages(_wanted_pages(tail, num_slots - table.room_X, np.zeros_like(table.room_X)))
    tail.take(room)


def _wanted_pages(tail: Segment, missing_X: Ints, spare_X: Ints) -> Wanted:
    """What Segment.reserve asks for when every layer is growing, of all heads at once."""
    heads = [(i, head) for i, layer in enumerate(tail.layers) for head in range(layer.num_heads)]
    sizes = [layer.page_class.page_size for layer in tail.layers for _ in range(layer.num_heads)]
    pages_X = np.where(missing_X > 0, -(-(missing_X + spare_X) // np.array(sizes)), 0)
    return {head: num_pages for head, num_pages in zip(heads, pages_X.tolist(), strict=True) if num_pages}


def append_blocks(sequences: Sequence[SequenceCache]) -> Stretches:
    """Count the committed slots of the open blocks as sealed; there is room for them, a slot of their codecs needs no
    neighbours. The caller writes the slots: until then what the new places hold is undefined."""
    tables = [segment_table(sequence.tail) for sequence in sequences]
    counts = [sequence.open.committed for sequence in sequences]
    sizes = [len(table.extents) for table in tables]
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
    _lengthen(tables, at_N, count_N)
    after_E = length_E + take_E
    for sequence, table, count, end in zip(sequences, tables, counts, accumulate(sizes), strict=True):
        _settle(sequence, table, count, after_E[end - len(table.extents) : end])
    return Stretches(owner_N, layer_N, head_E[at_N], begin_E[at_N], count_N, address_NF)


def _room_before(owner_E: Ints, row_E: Ints, room_E: Ints) -> Ints:
    """Room in older extents of the same head: new slots fill those first."""
    before_E = np.cumsum(room_E) - room_E
    is_first_E = np.ones(len(room_E), dtype=bool)
    is_first_E[1:] = (np.diff(owner_E) != 0) | (np.diff(row_E) != 0)
    return before_E - np.maximum.accumulate(np.where(is_first_E, before_E, 0))


def _lengthen(tables: Sequence[SegmentTable], at_N: Ints, count_N: Ints) -> None:
    extents = list(chain.from_iterable(table.extents for table in tables))
    for at, count in zip(at_N.tolist(), count_N.tolist(), strict=True):
        extents[at].length += count


def _settle(sequence: SequenceCache, table: SegmentTable, count: int, length_E: Ints) -> None:
    """The slots belong to the tail now; what is known of its places stays known."""
    sequence.sealed_len += count
    sequence.tail.changes.rise()
    remember(sequence.tail, SegmentTable(table.places, table.extents, length_E))
