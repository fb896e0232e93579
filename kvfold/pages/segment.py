"""Segments: sets of pages of all layers and heads over one range of committed tokens.

A sequence is a list of shared, frozen segments and one private tail. A head's pages lie in *extents*, runs of adjacent
pages of one span; heads of one layer usually get adjacent extents, which readers see as one *run* (a single decode, and
with equal lengths a single [H, slots, D] view).

    run of one layer:  | head 0: 5 pages, 77 slots used | head 1: 2 pages, 30 slots | head 2: … |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kvfold.codec.base import Side, Slots, State
from kvfold.pages.arena import Arena, Span
from kvfold.pages.layout import POSITION, PageClass

Codes = dict[str, Tensor]  # field name -> flat rows, head after head


@dataclass
class Extent:
    """Adjacent pages of one span owned by one head; the first `length` slots are used."""

    span: Span
    first: int
    num_pages: int
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.num_pages * self.span.page_class.page_size

    @property
    def room(self) -> int:
        """Slots that can still be written; a group that was closed early ends the extent."""
        return 0 if self.length % self.span.page_class.group else self.capacity - self.length


@dataclass(frozen=True)
class Run:
    """Adjacent extents of consecutive heads: what a reader decodes in one go."""

    extents: tuple[Extent, ...]
    heads: tuple[int, ...]

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(extent.length for extent in self.extents)

    @property
    def is_uniform(self) -> bool:
        """All heads have the same capacity and length: one strided view serves them all."""
        return len({(extent.num_pages, extent.length) for extent in self.extents}) == 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first slot of each head within the run."""
        page_size = self.extents[0].span.page_class.page_size
        return tuple((extent.first - self.extents[0].first) * page_size for extent in self.extents)

    def side(self, side: Side) -> Codes:
        """The codec's fields of one side, for every slot of the run, used or not."""
        return {name.partition(".")[2]: rows for name, rows in self._fields().items() if name.startswith(side + ".")}

    @cached_property
    def position_N(self) -> Tensor:
        return self._fields()[POSITION.name].squeeze(-1)

    def _fields(self) -> Codes:
        first, last = self.extents[0], self.extents[-1]
        page_class = first.span.page_class
        pages = (first.first, last.first + last.num_pages)
        found = {}
        for item in page_class.fields:
            rows = page_class.rows_per_page(item)
            found[item.name] = first.span.fields[item.name][pages[0] * rows : pages[1] * rows]
        return found


@dataclass
class LayerPages:
    """The pages of one layer: extents per head, and what the codecs learnt (State) when the first slot was sealed."""

    page_class: PageClass
    num_heads: int
    state: dict[Side, State] = field(default_factory=dict)
    extents: list[list[Extent]] = field(init=False)
    _runs: list[Run] | None = None

    def __post_init__(self) -> None:
        self.extents = [[] for _ in range(self.num_heads)]

    @property
    def lens(self) -> list[int]:
        return [sum(extent.length for extent in extents) for extents in self.extents]

    def room(self, head: int) -> int:
        return self.extents[head][-1].room if self.extents[head] else 0

    def runs(self) -> list[Run]:
        """Non-empty runs; the order of slots inside a head is that of the list."""
        if self._runs is None:
            depth = max((len(extents) for extents in self.extents), default=0)
            self._runs = [run for level in range(depth) for run in self._runs_of(level)]
        return self._runs

    def _runs_of(self, level: int) -> Iterator[Run]:
        at_level = [(head, extents[level]) for head, extents in enumerate(self.extents) if len(extents) > level]
        used = [(head, extent) for head, extent in at_level if extent.length]
        start = 0
        for i, (before, after) in enumerate(pairwise(used), start=1):
            a, b = before[1], after[1]
            if a.span is not b.span or a.first + a.num_pages != b.first:
                yield self._run(used[start:i])
                start = i
        if used:
            yield self._run(used[start:])

    @staticmethod
    def _run(members: Sequence[tuple[int, Extent]]) -> Run:
        return Run(tuple(extent for _, extent in members), tuple(head for head, _ in members))

    def positions(self, head: int) -> Tensor:
        """int32 [slots] of one head."""
        found = [self._rows(extent, POSITION.name).squeeze(-1) for extent in self.extents[head] if extent.length]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int32)

    def encode(self, k_ND: Tensor, v_ND: Tensor, position_N: Tensor, counts: Sequence[int]) -> Codes:
        """Codes of flat slots, head after head (counts per head); groups are filled by repeating a head's last slot."""
        index = _padded(counts, self.page_class.group)
        if index is not None:
            k_ND, v_ND, position_N = k_ND[index], v_ND[index], position_N[index]
            counts = [-(-count // self.page_class.group) * self.page_class.group for count in counts]
        row_N = torch.repeat_interleave(torch.arange(self.num_heads), torch.tensor(counts)).to(k_ND.device)
        codes: Codes = {POSITION.name: position_N.to(torch.int32).unsqueeze(-1)}
        sides: tuple[tuple[Side, Tensor], ...] = (("k", k_ND), ("v", v_ND))
        for side, x_ND in sides:
            fields = self.page_class.codec(side).encode(side, Slots(x_ND, row_N), self.state.get(side, {}))
            codes |= {f"{side}.{name}": rows for name, rows in fields.items()}
        return codes

    def append(self, codes: Codes, counts: Sequence[int]) -> None:
        """Write codes (as `encode` or `gather` made them) behind each head's slots; room was reserved before."""
        group = self.page_class.group
        source = 0
        for head, count in enumerate(counts):
            written = 0
            for extent in self.extents[head]:
                take = min(extent.room, count - written)
                if take > 0:
                    self._write(extent, codes, source + written, take)
                    written += take
            source += -(-count // group) * group
        self._runs = None

    def _write(self, extent: Extent, codes: Codes, source: int, count: int) -> None:
        page_class = self.page_class
        for item in page_class.fields:
            rows = page_class.rows_per_page(item)
            per = page_class.page_size // rows  # slots that share a row of this field
            at = (extent.first * page_class.page_size + extent.length) // per
            num = -(-count // per)
            extent.span.fields[item.name][at : at + num] = codes[item.name][source // per : source // per + num]
        extent.length += count

    def gather(self, keep: Sequence[Tensor]) -> Codes:
        """Codes of chosen slots (indices per head, ascending), byte for byte. Relocatable classes only."""
        codes: Codes = {}
        for item in self.page_class.fields:
            heads = []
            for head, index in enumerate(keep):
                rows = [self._rows(extent, item.name) for extent in self.extents[head] if extent.length]
                heads.append(torch.cat(rows)[index] if rows else self._empty(item.name))
            codes[item.name] = torch.cat(heads)
        return codes

    def truncate(self) -> list[Extent]:
        """Forget every slot but keep the pages; used before survivors are written back."""
        extents = [extent for extents in self.extents for extent in extents]
        for extent in extents:
            extent.length = 0
        self._runs = None
        return extents

    def release_unused(self) -> None:
        """Give pages that hold no slot back to their span."""
        page_size = self.page_class.page_size
        for head, extents in enumerate(self.extents):
            for extent in extents:
                used = -(-extent.length // page_size)
                if used < extent.num_pages:
                    extent.span.give(extent.first + used, extent.num_pages - used)
                    extent.num_pages = used
            self.extents[head] = [extent for extent in extents if extent.num_pages]
        self._runs = None

    def _rows(self, extent: Extent, name: str) -> Tensor:
        start = extent.first * self.page_class.page_size
        return extent.span.fields[name][start : start + extent.length]

    def _empty(self, name: str) -> Tensor:
        item = next(item for item in self.page_class.fields if item.name == name)
        return torch.empty(0, item.width, dtype=item.dtype)


def _padded(counts: Sequence[int], group: int) -> Tensor | None:
    """Indices that repeat each head's last slot up to a whole group, or None where nothing has to be repeated."""
    if all(count % group == 0 for count in counts):
        return None
    index: list[int] = []
    start = 0
    for count in counts:
        missing = -count % group
        index += [*range(start, start + count), *([start + count - 1] * missing)]
        start += count
    return torch.tensor(index, dtype=torch.int64)


class Segment:
    """Pages of all layers. Shared once frozen: references are counted, codes never change."""

    def __init__(self, arena: Arena, layers: Sequence[LayerPages]) -> None:
        self.arena = arena
        self.layers = list(layers)
        self.spans: dict[PageClass, list[Span]] = defaultdict(list)
        self.refs = 1
        self.is_frozen = False

    @classmethod
    def like(cls, other: Segment) -> Segment:
        """An empty segment with the same page classes and codec states."""
        layers = [LayerPages(layer.page_class, layer.num_heads, dict(layer.state)) for layer in other.layers]
        return cls(other.arena, layers)

    @property
    def is_empty(self) -> bool:
        return all(length == 0 for layer in self.layers for length in layer.lens)

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for spans in self.spans.values() for span in spans)

    @property
    def table_bytes(self) -> int:
        """Host tables: 24 bytes an extent (address, pages, length)."""
        return 24 * sum(len(extents) for layer in self.layers for extents in layer.extents)

    def reserve(self, counts: Sequence[Sequence[int]], *, slack: bool = False) -> None:
        """Make room for counts[layer][head] more slots. Raises OutOfPages before anything changes.

        `slack`: a head that must grow takes an eighth of its length more, so that extents stay few.
        """
        wanted = self._wanted_pages(counts, slack)
        missing: dict[PageClass, int] = defaultdict(int)
        for (layer, _), num_pages in wanted.items():
            missing[self.layers[layer].page_class] += num_pages
        lent: dict[PageClass, list[Span]] = {}
        try:
            for page_class, num_pages in missing.items():
                free = sum(span.num_free_pages for span in self.spans.get(page_class, ()))
                if num_pages > free:
                    lent[page_class] = self.arena.lend(page_class, num_pages - free)
        except MemoryError:
            for spans in lent.values():
                for span in spans:
                    self.arena.take_back(span)
            raise
        for page_class, spans in lent.items():
            self.spans[page_class] += spans
        for (layer, head), num_pages in wanted.items():
            self._give_pages(self.layers[layer], head, num_pages)

    def _wanted_pages(self, counts: Sequence[Sequence[int]], slack: bool) -> dict[tuple[int, int], int]:
        wanted = {}
        for i, layer in enumerate(self.layers):
            lens = layer.lens
            for head, count in enumerate(counts[i]):
                missing = count - sum(extent.room for extent in layer.extents[head])
                if missing > 0:
                    spare = lens[head] // 8 if slack else 0
                    wanted[i, head] = layer.page_class.pages_for(missing + spare)
        return wanted

    def _give_pages(self, layer: LayerPages, head: int, num_pages: int) -> None:
        for span in reversed(self.spans[layer.page_class]):  # the newest span is the one just lent
            while num_pages:
                run = span.take(num_pages)
                if run is None:
                    break
                layer.extents[head].append(Extent(span, *run))
                num_pages -= run[1]
        layer._runs = None

    def trim(self) -> None:
        """Return spans of which no page is in use."""
        for page_class, spans in self.spans.items():
            for span in [span for span in spans if span.num_free_pages == span.num_pages]:
                self.arena.take_back(span)
                spans.remove(span)
            self.spans[page_class] = spans

    def share(self) -> Segment:
        self.is_frozen = True
        self.refs += 1
        return self

    def release(self) -> None:
        """Drop one reference; the last one returns every span."""
        self.refs -= 1
        if self.refs == 0:
            for spans in self.spans.values():
                for span in spans:
                    self.arena.take_back(span)
            self.spans.clear()
