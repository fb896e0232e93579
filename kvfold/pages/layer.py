"""The KV pages of one layer: which head owns which (its page table), encoding, appending and gathering of slots; and
the change that a seal makes of it.

A head's pages lie in *extents*, stretches of adjacent pages of one span; heads usually get adjacent extents, which
readers see as one *run* (a single decode, and with equal lengths a single [H, slots, D] view).

    run of one layer:  | head 0: 5 pages, 77 slots used | head 1: 2 pages, 30 slots | head 2: … |

    N flat slots, head after head   D head dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers_from
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, CrossLayerCodec, Side, Slots, State
from kvfold.codec.basis import Basis
from kvfold.pages.arena import Span
from kvfold.pages.async_copy import row_numbers
from kvfold.pages.extent import Codes, Extent, Run
from kvfold.pages.layout import BIAS, POSITION, PageClass
from kvfold.pages.places import SegmentTable
from kvfold.pages.scatter import Place, Touched, summarise, write

_numbers = numbers_from()


class Changes:
    """`number` rises whenever slots or pages change, to one that no state of any pages has had before.

    `unwritten`: changes that so far stand in arrays only (pages/places.py). Thousands of heads grow at a seal and
    extents are not read until the next prompt, so they are brought up to date on access.
    `table`: the page table as arrays, once built.
    """

    def __init__(self) -> None:
        self.unwritten: Callable[[], None] | None = None
        self.rise()

    def rise(self) -> None:
        """Slots or pages have changed: what was derived from them no longer holds."""
        self.number = next(_numbers)
        self.table: SegmentTable | None = None

    def settle(self) -> None:
        """Bring extents up to date; slots and pages stay as they are."""
        if self.unwritten is not None:
            write, self.unwritten = self.unwritten, None
            write()


@dataclass
class LayerPages:
    """Extents per head, and the codecs' states (mean keys) from the first sealed slots.

    `bases`: of sides that are stored as latents; the model's, not the sequence's.
    `below`: the layer below in the same segment, for a cross-layer codec. Layers of a segment share `changes`.
    """

    page_class: PageClass
    num_heads: int
    state: dict[Side, State] = field(default_factory=dict)
    bases: Mapping[Side, Basis] = field(default_factory=dict, repr=False, compare=False)
    below: LayerPages | None = field(default=None, repr=False, compare=False)
    changes: Changes = field(default_factory=Changes, repr=False, compare=False)
    _extents: list[list[Extent]] = field(init=False)
    _runs: list[Run] = field(default_factory=list, repr=False, compare=False)
    _runs_at: int | None = field(default=None, repr=False, compare=False)  # the change they were made after

    def __post_init__(self) -> None:
        self._extents = [[] for _ in range(self.num_heads)]

    @property
    def extents(self) -> list[list[Extent]]:
        """Of each head, oldest first."""
        self.changes.settle()
        return self._extents

    @property
    def lens(self) -> list[int]:
        return [sum(extent.length for extent in extents) for extents in self.extents]

    def room(self, head: int) -> int:
        """Slots that can be appended without another page."""
        return sum(extent.room for extent in self.extents[head])

    def place(self, head: int, extent: Extent) -> int:
        """Slots of the head that lie before those of one of its extents."""
        level = next(i for i, mine in enumerate(self.extents[head]) if mine is extent)
        return sum(mine.length for mine in self.extents[head][:level])

    def runs(self) -> list[Run]:
        """Non-empty runs; the order of slots inside a head is that of the list."""
        if self._runs_at != self.changes.number:
            depth = max((len(extents) for extents in self.extents), default=0)
            self._runs = [run for level in range(depth) for run in self._runs_of(level)]
            self._runs_at = self.changes.number
        return self._runs

    def _runs_of(self, level: int) -> Iterator[Run]:
        adjacent: list[dict[int, Extent]] = []  # by head
        last: Extent | None = None
        for head, extents in enumerate(self.extents):
            if len(extents) <= level or not extents[level].length:
                continue
            extent = extents[level]
            if last is None or last.span is not extent.span or last.first + last.num_pages != extent.first:
                adjacent.append({})
            adjacent[-1][head] = last = extent
        return (Run(tuple(mine.values()), tuple(mine)) for mine in adjacent)

    def positions(self, head: int) -> Tensor:
        """int32 [slots] of one head."""
        found = [self._rows(extent, POSITION.name).squeeze(-1) for extent in self.extents[head] if extent.length]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int32)

    def encode(
        self,
        k_ND: Tensor,
        v_ND: Tensor,
        position_N: Tensor,
        counts: Sequence[int],
        bias_N: Tensor | None = None,
        below: Mapping[Side, Tensor] | None = None,
    ) -> Codes:
        """Codes of flat slots, head after head (counts per head); groups are filled by repeating a head's last slot.
        Without biases, slots that have one get 0.

        `below`: the same slots of the layer below, for a codec that needs them (pages/dequantize.py).
        """
        group, device = self.page_class.group, k_ND.device
        below = below or {}
        if any(count % group for count in counts):
            index_N = _padded(counts, group).to(device)
            k_ND, v_ND, position_N = k_ND[index_N], v_ND[index_N], position_N[index_N]
            bias_N = None if bias_N is None else bias_N[index_N]
            below = {side: x_ND[index_N] for side, x_ND in below.items()}
            counts = [_up_to(count, group) for count in counts]
        row_N = row_numbers(counts, device)
        codes: Codes = {POSITION.name: position_N.to(torch.int32).unsqueeze(-1)}
        if self.page_class.has_bias:
            known_N = torch.zeros(len(k_ND), device=device) if bias_N is None else bias_N
            codes[BIAS.name] = known_N.to(BIAS.dtype).unsqueeze(-1)
        for side, x_ND in zip(SIDES, (k_ND, v_ND), strict=True):
            if side in self.bases:
                x_ND = self.bases[side].latents(x_ND, position_N, counts)
            slots = Slots(x_ND, row_N, below.get(side))
            fields = self.page_class.codec(side).encode(side, slots, self.state.get(side, {}))
            codes |= {f"{side}.{name}": rows for name, rows in fields.items()}
        return codes

    def merge_below(self, side: Side, below_ND: Tensor, x_ND: Tensor, counts: Sequence[int]) -> Tensor:
        """New slots of the layer below, merged with this layer's by a cross-layer codec."""
        codec = self.page_class.codec(side)
        if not isinstance(codec, CrossLayerCodec) or not codec.merges_below:
            return below_ND
        index_N = _padded(counts, self.page_class.group).to(x_ND.device)
        first_N = torch.ones_like(index_N, dtype=torch.bool)
        first_N[1:] = index_N[1:] != index_N[:-1]
        return codec.merge_below(side, below_ND[index_N], x_ND[index_N])[first_N]

    def append(self, codes: Codes, counts: Sequence[int]) -> None:
        """Write codes (as `encode` or `gather` made them) behind each head's slots; room was reserved before."""
        places: list[Place] = []
        touched: list[Touched] = []
        for head, count in enumerate(counts):
            for extent in self.extents[head]:
                take = min(extent.room, count)
                if take > 0:
                    touched.append((extent, extent.length // self.page_class.page_size))
                    places.append(self._take(extent, take))
                    count -= take
        write(self.page_class, codes, places)
        if self.page_class.summaries:
            summarise(self.page_class, touched)
        self.changes.rise()

    def _take(self, extent: Extent, count: int) -> Place:
        """Where the next slots of an extent go, in whole groups: what is saved later was all written."""
        slot = extent.first * self.page_class.page_size + extent.length
        extent.length += count
        return Place(extent.span, slot, _up_to(count, self.page_class.group))

    def gather(self, keep: Sequence[Tensor]) -> Codes:
        """Codes of chosen slots (indices per head, ascending), byte for byte. Relocatable classes only."""
        codes: Codes = {}
        for item in self.page_class.fields:
            heads = []
            for extents, index in zip(self.extents, keep, strict=True):
                rows = [self._rows(extent, item.name) for extent in extents if extent.length]
                empty = torch.empty(0, item.width, dtype=item.dtype, device=index.device)
                heads.append(torch.cat(rows)[index] if rows else empty)
            codes[item.name] = torch.cat(heads)
        return codes

    def truncate(self, lens: Sequence[int] | None = None) -> None:
        """Forget every slot behind the first lens[head] (default: every slot), but keep the pages."""
        for head, extents in enumerate(self.extents):
            left = 0 if lens is None else lens[head]
            for extent in extents:
                extent.length = min(extent.length, left)
                left -= extent.length
        self.changes.rise()

    def first_slots(self, num_slots: int) -> LayerPages:
        """The first slots of every head, in the same pages; what is appended needs others."""
        found = LayerPages(self.page_class, self.num_heads, dict(self.state), self.bases)
        for mine, extents in zip(found._extents, self.extents, strict=True):
            left = num_slots
            for extent in extents:
                if left > 0:
                    mine.append(replace(extent, length=min(extent.length, left)))
                    left -= extent.length
        return found

    def release_unused(self, spare_len: int = 0) -> None:
        """Give pages that hold no slot back to their span, but for room of `spare_len` slots in each head."""
        for head, extents in enumerate(self.extents):
            spare = self.page_class.pages_for(spare_len)
            for extent in extents:
                used = self.page_class.pages_for(extent.length)
                kept = min(extent.num_pages, used + spare)
                spare -= kept - used
                if kept < extent.num_pages:
                    extent.span.free_pages(extent.first + kept, extent.num_pages - kept)
                    extent.num_pages = kept
            self.extents[head] = [extent for extent in extents if extent.num_pages]
        self.changes.rise()

    def grow(self, head: int, span: Span, first: int, num_pages: int) -> None:
        """Take over pages of a span for one head."""
        add_pages(self.extents[head], span, first, num_pages)
        self.changes.rise()

    def _rows(self, extent: Extent, name: str) -> Tensor:
        start = extent.first * self.page_class.page_size
        return extent.span.fields[name][start : start + extent.length]


def add_pages(extents: list[Extent], span: Span, first: int, num_pages: int) -> None:
    """Pages behind a head's others: its last extent becomes longer where they continue it."""
    if extents and extents[-1].can_grow_by(span, first):
        extents[-1].num_pages += num_pages
    else:
        extents.append(Extent(span, first, num_pages))


def _up_to(count: int, group: int) -> int:
    """The next multiple of the group."""
    return -(-count // group) * group


def _padded(counts: Sequence[int], group: int) -> Tensor:
    """Indices of flat slots that repeat each head's last slot up to a whole group."""
    parts, start = [], 0
    for count in counts:
        parts.append(torch.arange(start, start + _up_to(count, group)).clamp(max=start + count - 1))
        start += count
    return torch.cat(parts)


class EvictedSlots(NamedTuple):
    """Evicted new slots to be offloaded, head after head; on the host."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]


@dataclass
class LayerChange:
    """Stored slots to keep (None: all), and new slots to encode, head after head.

    `drop_first`: stored slots of every head that a sliding window has passed. Attention masks them, so they are dropped
    only if that needs no copy of a shared segment.
    """

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]
    keep: list[Tensor] | None = None
    drop_first: int = 0
    bias_N: Tensor | None = None  # of the new slots; None: 0
    evicted: tuple[EvictedSlots, ...] = ()
