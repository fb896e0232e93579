"""Segments: refcounted KV pages of all layers and heads over one range of committed tokens (shared prefix blocks).

A sequence is a list of shared segments, which never change (copy-on-write), and one private tail. Refcounts are kept
per segment, not per page: a long prompt has hundreds of thousands of pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena, Span
from kvfold.pages.extent import Codes
from kvfold.pages.layer import Changes, LayerPages
from kvfold.pages.layout import PageClass
from kvfold.pages.places import COLUMNS, Ints, Places, SegmentTable, heads_of, span_address, stride_table

GROWTH = 8  # a head that grows gets room for 1/8 of what heads hold on average
TABLE_BYTES = 24  # of an extent: address, pages, length
Wanted = dict[tuple[int, int], int]  # (layer, head) -> pages


class Room(NamedTuple):
    """Pages that heads of a segment want, and the spans allocated for them; the segment is still as it was."""

    wanted: Wanted
    spans: Mapping[PageClass, list[Span]]

    def cancel(self) -> None:
        """Free the spans; the segment takes nothing."""
        for spans in self.spans.values():
            for span in spans:
                span.arena.free(span)


class Segment:
    """Pages of all layers. `end_len`: committed tokens up to its end, known once it is shared."""

    def __init__(self, arena: Arena, layers: Sequence[LayerPages]) -> None:
        self.arena = arena
        self.layers = list(layers)
        self.changes = layers[0].changes
        for layer in self.layers:
            layer.changes = self.changes
            layer.page_class = arena.intern(layer.page_class)
        for lower, upper in pairwise(self.layers):
            upper.below = lower if upper.page_class.needs_below else None
        self.spans: dict[PageClass, list[Span]] = defaultdict(list)
        self.derived: dict[str, Any] = {}  # by kernels, as long as its codecs' states stay
        self.refs = 1
        self.end_len = 0
        self._firsts: dict[int, FirstSlots] = {}  # by their number of slots

    @classmethod
    def like(cls, other: Segment) -> Segment:
        """An empty segment with the same page classes and codec states."""
        changes = Changes()
        layers = [
            LayerPages(layer.page_class, layer.num_heads, dict(layer.state), layer.bases, changes=changes)
            for layer in other.layers
        ]
        return cls(other.arena, layers)

    @cached_property
    def group(self) -> int:
        """The most slots that share metadata in a layer."""
        return max(layer.page_class.group for layer in self.layers)

    @property
    def is_empty(self) -> bool:
        table = self.changes.table
        if table is not None:
            return not table.length_E.any()
        return all(length == 0 for layer in self.layers for length in layer.lens)

    @property
    def lens_X(self) -> Ints:
        """Slots of each head, layer after layer."""
        table = segment_table(self)
        return np.bincount(table.places.row_E, table.length_E, table.places.num_rows).astype(np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for spans in self.spans.values() for span in spans)

    @property
    def table_bytes(self) -> int:
        """Host tables of the extents."""
        return TABLE_BYTES * sum(len(extents) for layer in self.layers for extents in layer.extents)

    @property
    def state_bytes(self) -> int:
        """Bytes of the codecs' states, which segments of one sequence share."""
        states = [state for layer in self.layers for state in layer.state.values()]
        return sum(tensor.nbytes for state in states for tensor in state.values())

    def find_room(self, counts: Sequence[Sequence[int]], *, growing: Collection[int] = ()) -> Room:
        """Room for counts[layer][head] more slots, to be taken or cancelled. Raises OutOfPages.

        A head of a `growing` layer that needs pages gets an eighth of these layers' mean length more, if there is
        memory for it, so that its extents stay few: while decoding all heads grow at one speed, short ones too.
        """
        try:
            return self._room(self._wanted_pages(counts, growing))
        except OutOfPages:
            return self._room(self._wanted_pages(counts, ()))

    def take(self, room: Room) -> None:
        """Give the pages to the heads that wanted them."""
        for page_class, spans in room.spans.items():
            self.spans[page_class] += spans
        heads: dict[PageClass, list[tuple[LayerPages, int, int]]] = defaultdict(list)
        for (index, head), num_pages in room.wanted.items():
            layer = self.layers[index]
            heads[layer.page_class].append((layer, head, num_pages))
        for page_class, wanting in heads.items():
            _assign_pages(self.spans[page_class], wanting)
        self.changes.rise()

    def reserve(self, counts: Sequence[Sequence[int]], *, growing: Collection[int] = ()) -> None:
        """Find room and take it. Raises OutOfPages before anything changes."""
        self.take(self.find_room(counts, growing=growing))

    def _wanted_pages(self, counts: Sequence[Sequence[int]], growing: Collection[int]) -> Wanted:
        wanted = {}
        lens = [length for i in growing for length in self.layers[i].lens]
        spare = sum(lens) // max(1, len(lens) * GROWTH)
        for i, layer in enumerate(self.layers):
            for head, count in enumerate(counts[i]):
                missing = count - layer.room(head)
                if missing > 0:
                    wanted[i, head] = layer.page_class.pages_for(missing + (spare if i in growing else 0))
        return wanted

    def _room(self, wanted: Wanted) -> Room:
        num_pages: dict[PageClass, int] = defaultdict(int)
        for (layer, _), count in wanted.items():
            num_pages[self.layers[layer].page_class] += count
        return Room(wanted, self.allocate_spans(num_pages))

    def allocate_spans(self, num_pages: Mapping[PageClass, int]) -> Mapping[PageClass, list[Span]]:
        """Spans for what free pages do not cover, of all classes or of none; the caller adds them to the segment."""
        found: dict[PageClass, list[Span]] = {}
        try:
            for page_class, count in num_pages.items():
                free = sum(span.num_free_pages for span in self.spans.get(page_class, ()))
                if count > free:
                    found[page_class] = self.arena.allocate(page_class, count - free)
        except OutOfPages:
            for span in (span for spans in found.values() for span in spans):
                self.arena.free(span)
            raise
        return found

    def trim(self) -> None:
        """Return spans of which no page is in use."""
        for spans in self.spans.values():
            for span in [span for span in spans if span.num_free_pages == span.num_pages]:
                self.arena.free(span)
                spans.remove(span)

    def partial_pages(self) -> tuple[list[Codes], list[list[int]]]:
        """Codes of the slots in the last page of each head, where a reader ranks pages and that page is not full, and
        how many of each head."""
        counts = []
        for layer in self.layers:
            size = layer.page_class.page_size if layer.page_class.reader.selects else 1
            counts.append([length % size for length in layer.lens])
        return self._last_codes(counts), counts

    def _last_codes(self, counts: Sequence[Sequence[int]]) -> list[Codes]:
        """Codes of the last counts[layer][head] slots."""
        found = []
        for layer, mine in zip(self.layers, counts, strict=True):
            ends = zip(layer.lens, mine, strict=True)
            found.append(layer.gather([torch.arange(n - count, n, device=self.arena.device) for n, count in ends]))
        return found

    def append_codes(self, codes: Sequence[Codes], counts: Sequence[Sequence[int]]) -> None:
        """Slots of every layer, byte for byte, behind the others. Raises OutOfPages before anything changes."""
        self.reserve(counts)
        for layer, mine, its_counts in zip(self.layers, codes, counts, strict=True):
            layer.append(mine, its_counts)

    def append_from(self, other: Segment) -> None:
        """All slots of another segment. Raises OutOfPages before anything changes."""
        counts = [layer.lens for layer in other.layers]
        self.append_codes(other._last_codes(counts), counts)

    def drop_last(self, counts: Sequence[Sequence[int]]) -> None:
        """Forget the last counts[layer][head] slots."""
        for layer, its_counts in zip(self.layers, counts, strict=True):
            layer.truncate([length - count for length, count in zip(layer.lens, its_counts, strict=True)])

    def share(self) -> Segment:
        self.refs += 1
        return self

    def share_first(self, num_tokens: int) -> Segment | None:
        """The first tokens of a shared segment that has all its tokens. None where they are less than half of them,
        since the pages of all of them stay, or where a reader ranks pages and the last one would be partial."""
        length = self.layers[0].lens[0]
        if num_tokens >= length:
            return self.share()
        is_ranked = any(layer.page_class.reader.selects for layer in self.layers)
        return None if 2 * num_tokens < length or is_ranked else self._first(num_tokens)

    def _first(self, num_slots: int) -> Segment:
        """One object for all that share as many slots, so that they are known to share them."""
        known = self._firsts.get(num_slots)
        if known is not None:
            return known.share()
        found = self._firsts[num_slots] = FirstSlots(self, num_slots)
        return found

    def forget_first(self, num_slots: int) -> None:
        """Nobody shares them any more."""
        del self._firsts[num_slots]

    def release(self) -> None:
        """Drop one reference; the last one returns every span."""
        self.refs -= 1
        if self.refs == 0:
            for spans in self.spans.values():
                for span in spans:
                    self.arena.free(span)
            self.spans.clear()


class FirstSlots(Segment):
    """The first slots of every head of a segment, in its pages, which it keeps. One reference is its own, so it never
    becomes the tail of a sequence."""

    def __init__(self, whole: Segment, num_slots: int) -> None:
        super().__init__(whole.arena, [layer.first_slots(num_slots) for layer in whole.layers])
        self._whole, self._num_slots = whole.share(), num_slots
        self.spans, self.refs = whole.spans, 2

    def _first(self, num_slots: int) -> Segment:
        return self._whole._first(num_slots)

    def release(self) -> None:
        """Drop one reference; with the last one but its own the pages lose one."""
        self.refs -= 1
        if self.refs == 1:
            self._whole.forget_first(self._num_slots)
            self._whole.release()


def _assign_pages(spans: Sequence[Span], heads: Sequence[tuple[LayerPages, int, int]]) -> None:
    """(layer, head, pages it wants): heads that follow one another get adjacent pages, where there are enough."""
    runs = take_free_runs(spans, sum(num_pages for _, _, num_pages in heads))
    span, first, left = next(runs)
    for layer, head, num_pages in heads:
        while num_pages:
            if not left:
                span, first, left = next(runs)
            taken = min(num_pages, left)
            layer.grow(head, span, first, taken)
            first, left, num_pages = first + taken, left - taken, num_pages - taken


def take_free_runs(spans: Sequence[Span], num_pages: int) -> Iterator[tuple[Span, int, int]]:
    """(span, first page, how many) of runs taken for so many pages in all; from the newest span first: it may have
    just been allocated for them."""
    for span in reversed(spans):
        while num_pages and (run := span.allocate_pages(num_pages)):
            yield span, *run
            num_pages -= run[1]


def segment_table(segment: Segment) -> SegmentTable:
    """The page table of a segment as arrays (places.py), built on first use; the same object until its slots or pages
    change."""
    found = segment.changes.table
    if found is None:
        found = segment.changes.table = _build_table(segment)
    return found


def _build_table(segment: Segment) -> SegmentTable:
    per_head = [extents for layer in segment.layers for extents in layer.extents]
    extents = list(chain.from_iterable(per_head))
    heads = heads_of(tuple(layer.num_heads for layer in segment.layers))
    row_E = np.repeat(np.arange(len(per_head)), [len(of_head) for of_head in per_head])
    layer_E = heads[0][row_E]
    size_E = np.array([layer.page_class.page_size for layer in segment.layers])[layer_E]
    group_E = np.array([layer.page_class.group for layer in segment.layers])[layer_E]
    first_E = size_E * _ints([extent.first for extent in extents])
    stride_LF = stride_table(tuple(layer.page_class for layer in segment.layers))
    number = {span: i for i, span in enumerate(dict.fromkeys(extent.span for extent in extents))}
    base_SF = _ints([span_address(span) for span in number]).reshape(-1, len(COLUMNS) + 1)  # of the first page's fields
    base_EF = base_SF[_ints([number[extent.span] for extent in extents])]
    address_EF = base_EF + first_E[:, None] * stride_LF[layer_E]
    length_E = _ints([extent.length for extent in extents])
    capacity_E = size_E * _ints([extent.num_pages for extent in extents])
    capacity_E = np.where(length_E % group_E, length_E, capacity_E)
    return SegmentTable.of(Places.of(row_E, capacity_E, address_EF, stride_LF, heads), length_E)


def _ints(numbers: Sequence[int] | Sequence[list[int]]) -> Ints:
    return np.array(numbers, dtype=np.int64)
