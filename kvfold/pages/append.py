"""Make room for a block of new slots behind every head and say where each goes: the host's part of a seal that evicts
nothing. A kernel then encodes the slots of all layers, heads and sequences in one launch.

    N stretches: new slots of one head that go to adjacent places of one extent
"""

from __future__ import annotations

from typing import NamedTuple

from kvfold.pages.layer import Extent, LayerPages
from kvfold.pages.layout import POSITION
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import columns, slot_strides


class Stretch(NamedTuple):
    """`num_slots` new slots from the open block's slot `begin` on, and the byte addresses of their places."""

    layer: int
    head: int
    begin: int
    num_slots: int
    addresses: tuple[int, ...]  # columns of pages/table.py, then positions


def append_block(sequence: SequenceCache) -> list[Stretch]:
    """Count the committed slots of the open block as sealed. OutOfPages leaves the sequence as it was.

    The caller writes the slots; until then what the new places hold is undefined.
    """
    sequence.reclaim_tail()
    num_slots, tail = sequence.open.committed, sequence.tail
    tail.reserve([[num_slots] * layer.num_heads for layer in tail.layers], growing=range(len(tail.layers)))
    found = []
    for index, layer in enumerate(tail.layers):
        steps = (*slot_strides(layer.page_class), POSITION.bytes())
        names = [None if item is None else item.name for item in columns(layer.page_class)] + [POSITION.name]
        for head in range(layer.num_heads):
            for begin, extent, at, count in _places(layer, head, num_slots):
                slot = extent.first * layer.page_class.page_size + at
                bases = (0 if name is None else extent.span.addresses[name] for name in names)
                where = tuple(base + slot * step for base, step in zip(bases, steps, strict=True))
                found.append(Stretch(index, head, begin, count, where))
    sequence.sealed_len += num_slots
    return found


def _places(layer: LayerPages, head: int, num_slots: int) -> list[tuple[int, Extent, int, int]]:
    """(first new slot, extent, slot within it, how many) for each extent that takes some; their lengths rise."""
    found, done = [], 0
    for extent in layer.extents[head]:
        take = min(extent.room, num_slots - done)
        if take > 0:
            found.append((done, extent, extent.length, take))
            extent.length += take
            done += take
    layer.touch()
    return found
