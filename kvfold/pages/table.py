"""Where every slot of a segment lies, as arrays of byte addresses: what kernels are given instead of views.

An extent is one dense array per field, so an address and a stride per field say where each of its slots is.

    E extents, layer by layer, then head by head, oldest first   F the fields a kernel reads (COLUMNS)
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvfold.codec.base import Field
from kvfold.pages.arena import Span
from kvfold.pages.layout import PageClass
from kvfold.pages.segment import Segment

Ints = NDArray[np.int64]

# A codec has some of these; the address of a field it lacks is 0. Floats are stored under "x", codes under "code".
COLUMNS = (("k.x", "k.code"), ("k.scale",), ("k.zero",), ("v.x", "v.code"), ("v.scale",), ("v.zero",))


@dataclass(frozen=True)
class SegmentTable:
    """One row per used extent."""

    layer_E: Ints
    head_E: Ints
    length_E: Ints
    address_EF: Ints  # bytes from the start of the arena


def columns(page_class: PageClass) -> tuple[Field | None, ...]:
    """The field of a page class in each column."""
    by_name = {item.name: item for item in page_class.fields}
    return tuple(next((by_name[name] for name in names if name in by_name), None) for names in COLUMNS)


def slot_strides(page_class: PageClass) -> list[int]:
    """Bytes from slot to slot in each column (of a field that slots share: their part of it)."""
    found = []
    for item in columns(page_class):
        rows = 0 if item is None else page_class.rows_per_page(item)
        found.append(0 if item is None else rows * item.bytes() // page_class.page_size)
    return found


_known: WeakKeyDictionary[Segment, tuple[int, SegmentTable]] = WeakKeyDictionary()


def segment_table(segment: Segment) -> SegmentTable:
    """The table of a segment; the same object until its pages change."""
    version = sum(layer.version for layer in segment.layers)
    known = _known.get(segment)
    if known is None or known[0] != version:
        known = _known[segment] = (version, _build(segment))
    return known[1]


def _build(segment: Segment) -> SegmentTable:
    bases: dict[Span, list[int]] = {}
    rows, addresses = [], []
    for index, layer in enumerate(segment.layers):
        strides = [stride * layer.page_class.page_size for stride in slot_strides(layer.page_class)]
        for head, extents in enumerate(layer.extents):
            for extent in extents:
                if extent.length:
                    base = bases.get(extent.span) or bases.setdefault(extent.span, _bases(extent.span))
                    rows.append((index, head, extent.length))
                    addresses.append([at + extent.first * step for at, step in zip(base, strides, strict=True)])
    layer_E, head_E, length_E = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return SegmentTable(layer_E, head_E, length_E, np.array(addresses, dtype=np.int64).reshape(-1, len(COLUMNS)))


def _bases(span: Span) -> list[int]:
    """Byte addresses of the first page's fields."""
    return [0 if item is None else span.addresses[item.name] for item in columns(span.page_class)]
