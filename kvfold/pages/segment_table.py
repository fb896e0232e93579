"""Builds the page table of a segment (places.py) from its extents, on first use.

E extents   L layers   F the fields a kernel reads (COLUMNS), then positions
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvfold.pages.extent import Extent
from kvfold.pages.places import COLUMNS, Ints, Places, SegmentTable, heads_of, span_address, stride_table
from kvfold.pages.segment import Segment


def segment_table(segment: Segment) -> SegmentTable:
    """The table of a segment; the same object until its slots or pages change."""
    found = segment.changes.table
    if found is None:
        found = segment.changes.table = _build(segment)
    return found


def _build(segment: Segment) -> SegmentTable:
    per_head = [extents for layer in segment.layers for extents in layer.extents]
    extents = list(chain.from_iterable(per_head))
    heads = heads_of(tuple(layer.num_heads for layer in segment.layers))
    row_E = np.repeat(np.arange(len(per_head)), [len(of_head) for of_head in per_head])
    layer_E = heads[0][row_E]
    size_E = np.array([layer.page_class.page_size for layer in segment.layers])[layer_E]
    group_E = np.array([layer.page_class.group for layer in segment.layers])[layer_E]
    first_E = size_E * _ints([extent.first for extent in extents])
    stride_LF = stride_table(tuple(layer.page_class for layer in segment.layers))
    address_EF = _bases(extents) + first_E[:, None] * stride_LF[layer_E]
    length_E = _ints([extent.length for extent in extents])
    capacity_E = size_E * _ints([extent.num_pages for extent in extents])
    capacity_E = np.where(length_E % group_E, length_E, capacity_E)
    return SegmentTable.of(Places.of(row_E, capacity_E, address_EF, stride_LF, heads), length_E)


def _ints(numbers: Sequence[int] | Sequence[list[int]]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def _bases(extents: Sequence[Extent]) -> Ints:
    """[E, F]: byte addresses of the first page's fields in each extent's span."""
    number = {span: i for i, span in enumerate(dict.fromkeys(extent.span for extent in extents))}
    base_SF = _ints([span_address(span) for span in number]).reshape(-1, len(COLUMNS) + 1)
    return base_SF[_ints([number[extent.span] for extent in extents])]
