"""Page table of a segment as arrays: address and stride of every extent, for kernels and for batched appends.

An extent is one dense array per field, so an address and a stride per field say where each of its slots is. Slots that
are appended change lengths only; `Places` stays the same object as long as nothing has moved.

    E extents, layer by layer, then head by head, oldest first   L layers   X heads of all layers
    F the fields a kernel reads (COLUMNS), then positions
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.codec.base import Field
from kvfold.pages.arena import Span
from kvfold.pages.layout import POSITION, PageClass

Ints = NDArray[np.int64]

# A codec has some of these; the address of a field it lacks is 0. Floats are stored under "x", codes under "code".
COLUMNS = (("k.x", "k.code"), ("k.scale",), ("k.zero",), ("v.x", "v.code"), ("v.scale",), ("v.zero",), ("bias",))


Heads = tuple[Ints, Ints]  # the layer of each of the X heads, and its number there


@cache
def heads_of(num_heads: tuple[int, ...]) -> Heads:
    """Of layers with so many heads."""
    layer_X = np.repeat(np.arange(len(num_heads)), num_heads)
    return layer_X, np.concatenate([np.arange(count) for count in num_heads])


@dataclass(frozen=True, eq=False)
class Places:
    """The extents of a segment, used or not: the same object until a head gets or loses pages."""

    layer_E: Ints
    head_E: Ints
    row_E: Ints  # which of the X heads
    capacity_E: Ints  # slots that it can hold; a group that was closed early ends it
    address_EF: Ints  # bytes from the start of the arena
    stride_LF: Ints  # bytes from slot to slot
    heads: Heads
    derived: dict[str, Any] = field(default_factory=dict, repr=False)  # by kernels

    @classmethod
    def of(cls, row_E: Ints, capacity_E: Ints, address_EF: Ints, stride_LF: Ints, heads: Heads) -> Places:
        layer_X, head_X = heads
        return cls(layer_X[row_E], head_X[row_E], row_E, capacity_E, address_EF, stride_LF, heads)

    @property
    def num_rows(self) -> int:
        """X"""
        return len(self.heads[0])


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """A segment's extents at one moment: where they lie and how many slots of each are used."""

    places: Places
    length_E: Ints
    least_room: int  # slots that every head can take without another page

    @classmethod
    def of(cls, places: Places, length_E: Ints) -> SegmentTable:
        return cls(places, length_E, int(_room(places, length_E).min()))

    @cached_property
    def room_X(self) -> Ints:
        """Slots that can be appended to each head without another page."""
        return _room(self.places, self.length_E)


def _room(places: Places, length_E: Ints) -> Ints:
    return np.bincount(places.row_E, places.capacity_E - length_E, places.num_rows).astype(np.int64)


def is_first(row_E: Ints) -> NDArray[np.bool]:
    """Whether an entry begins a stretch of equal numbers."""
    found_E = np.ones(len(row_E), dtype=bool)
    np.not_equal(row_E[1:], row_E[:-1], out=found_E[1:])
    return found_E


def before_in_group(row_E: Ints, count_E: Ints) -> Ints:
    """Sum of the counts before each entry in its stretch of equal numbers."""
    first_E = is_first(row_E)
    if first_E.all():
        return np.zeros_like(count_E)
    before_E = np.cumsum(count_E) - count_E
    return np.asarray(before_E - np.maximum.accumulate(np.where(first_E, before_E, 0)))


@cache
def columns(page_class: PageClass) -> tuple[Field | None, ...]:
    """The field of a page class in each column."""
    by_name = {item.name: item for item in page_class.fields}
    return tuple(next((by_name[name] for name in names if name in by_name), None) for names in COLUMNS)


@cache
def slot_strides(page_class: PageClass) -> tuple[int, ...]:
    """Bytes from slot to slot in each column (of a field that slots share: their part of it)."""
    found = []
    for item in columns(page_class):
        rows = 0 if item is None else page_class.rows_per_page(item)
        found.append(0 if item is None else rows * item.bytes() // page_class.page_size)
    return tuple(found)


@cache
def stride_table(classes: tuple[PageClass, ...]) -> Ints:
    """[L, F] of the layers' page classes."""
    return np.array([(*slot_strides(page_class), POSITION.bytes()) for page_class in classes], dtype=np.int64)


def span_address(span: Span) -> list[int]:
    """[F]: byte addresses of the first page's fields."""
    names = [None if item is None else item.name for item in columns(span.page_class)]
    return [0 if name is None else span.addresses[name] for name in (*names, POSITION.name)]
