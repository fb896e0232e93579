"""Batched page allocation: pages for all heads of a tail at once, computed on arrays.

The page table of a segment (pages/places.py) is extended, not rebuilt: new pages are rows behind each head's others.
Extents are updated on access. Pages are freed in arena.py (`Span.free_pages`, `Arena.free`).

    E extents   X heads of all layers   P pieces: adjacent pages that one head gets   R runs of free pages
    F address columns of pages/places.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvfold.pages.arena import Span
from kvfold.pages.layer import LayerPages, add_pages
from kvfold.pages.layout import PageClass
from kvfold.pages.places import Ints, Places, SegmentTable, heads_of, is_first, span_address
from kvfold.pages.segment import Segment, take_free_runs

Spans = Mapping[PageClass, list[Span]]


class _Pieces(NamedTuple):
    """Head after head; `span_P` counts in `spans`."""

    spans: list[Span]
    row_P: Ints
    span_P: Ints
    first_P: Ints
    count_P: Ints


@dataclass
class _Unwritten:
    """What extents do not know yet: pages that were added, and the lengths since."""

    layers: list[LayerPages]
    length_E: Ints
    added: list[_Pieces] = field(default_factory=list)

    def __call__(self) -> None:
        heads = [extents for layer in self.layers for extents in layer.extents]
        for spans, *columns in self.added:
            for row, span, first, count in zip(*(column.tolist() for column in columns), strict=True):
                add_pages(heads[row], spans[span], first, count)
        for extent, length in zip(chain.from_iterable(heads), self.length_E.tolist(), strict=True):
            extent.length = length


def defer_extents(tail: Segment, table: SegmentTable, added: _Pieces | None = None) -> None:
    """Set the tail's page table; its extents are updated on access."""
    later = tail.changes.unwritten
    if not isinstance(later, _Unwritten):
        later = tail.changes.unwritten = _Unwritten(tail.layers, table.length_E)
    later.length_E = table.length_E
    if added is not None:
        later.added.append(added)
    tail.changes.rise()
    tail.changes.table = table


def allocate_pages(tail: Segment, table: SegmentTable, pages_X: Ints) -> None:
    """Allocate so many pages for each head. Raises OutOfPages before anything changes."""
    take_pages(tail, table, pages_X, find_spans(tail, pages_X))


def find_spans(tail: Segment, pages_X: Ints) -> Spans:
    """Spans for what free pages do not cover of so many for each head, to be taken or freed. Raises OutOfPages."""
    wanted = {page_class: int(pages_X[row_X].sum()) for page_class, row_X in _rows_of(tail).items()}
    return tail.allocate_spans({page_class: count for page_class, count in wanted.items() if count})


def take_pages(tail: Segment, table: SegmentTable, pages_X: Ints, found: Spans) -> None:
    """Give the heads their pages, from free ones and from the spans that were found for them."""
    for page_class, spans in found.items():
        tail.spans[page_class] += spans
    for page_class, row_X in _rows_of(tail).items():
        row_X = row_X[pages_X[row_X] > 0]
        if len(row_X):
            runs = list(take_free_runs(tail.spans[page_class], int(pages_X[row_X].sum())))
            pieces = _cut(runs, row_X, pages_X[row_X])
            table = _extended(table, pieces, page_class)
            defer_extents(tail, table, pieces)


def _rows_of(tail: Segment) -> dict[PageClass, Ints]:
    classes = tuple(layer.page_class for layer in tail.layers)
    return _rows_by_class(classes, tuple(layer.num_heads for layer in tail.layers))


@cache
def _rows_by_class(classes: tuple[PageClass, ...], num_heads: tuple[int, ...]) -> dict[PageClass, Ints]:
    """The heads of each page class, ascending."""
    layer_X, _ = heads_of(num_heads)
    return {
        page_class: np.array([mine is page_class for mine in classes])[layer_X].nonzero()[0]
        for page_class in dict.fromkeys(classes)
    }


def _cut(runs: Sequence[tuple[Span, int, int]], row_X: Ints, pages_X: Ints) -> _Pieces:
    """Heads take pages from runs in order; a piece ends where its head or its run does."""
    first_R, count_R = np.array([run[1:] for run in runs]).T
    end_X, end_R = np.cumsum(pages_X), np.cumsum(count_R)
    border_P = np.sort(np.concatenate(([0], end_X[:-1], end_R[:-1])))
    begin_P = border_P[is_first(border_P)]  # np.unique loads a module of masked arrays first
    run_P = np.searchsorted(end_R, begin_P, side="right")
    first_P = first_R[run_P] + begin_P - (end_R - count_R)[run_P]
    head_P = np.searchsorted(end_X, begin_P, side="right")
    return _Pieces([run[0] for run in runs], row_X[head_P], run_P, first_P, np.append(begin_P[1:], end_X[-1]) - begin_P)


def _extended(table: SegmentTable, pieces: _Pieces, page_class: PageClass) -> SegmentTable:
    """With the pieces as extents behind each head's others; one that continues the last makes it longer."""
    old, (spans, row_P, span_P, first_P, count_P) = table.places, pieces
    layer_X, _ = old.heads
    stride_PF = old.stride_LF[layer_X[row_P]]
    base_RF = np.array([span_address(span) for span in spans])
    address_PF = base_RF[span_P] + (first_P * page_class.page_size)[:, None] * stride_PF
    added_P = count_P * page_class.page_size
    last_P = np.searchsorted(old.row_E, row_P, side="right") - 1
    end_E = old.address_EF[:, 0] + old.capacity_E * old.stride_LF[old.layer_E, 0]
    continues_P = np.zeros(len(row_P), dtype=bool)
    if len(end_E):
        is_last_P = is_first(row_P) & (old.row_E[last_P] == row_P)  # no other piece lies between
        continues_P = is_last_P & (end_E[last_P] == address_PF[:, 0])
    capacity_E = old.capacity_E.copy()
    capacity_E[last_P[continues_P]] += added_P[continues_P]
    new = ~continues_P
    order_E = np.argsort(np.concatenate((old.row_E, row_P[new])), kind="stable")
    places = Places.of(
        np.concatenate((old.row_E, row_P[new]))[order_E],
        np.concatenate((capacity_E, added_P[new]))[order_E],
        np.concatenate((old.address_EF, address_PF[new]))[order_E],
        old.stride_LF,
        old.heads,
    )
    return SegmentTable.of(places, np.append(table.length_E, np.zeros_like(row_P[new]))[order_E])
