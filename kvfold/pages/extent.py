"""Adjacent KV pages: the extents that heads own, and the runs of extents that are decoded in one call.

N flat slots, head after head   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.codec.base import Field, Side
from kvfold.pages.arena import Span
from kvfold.pages.layout import BIAS, POSITION

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

    def can_grow_by(self, span: Span, first: int) -> bool:
        """Whether pages from `first` on continue this extent."""
        is_next = self.span is span and self.first + self.num_pages == first
        return is_next and self.length % span.page_class.group == 0


@dataclass(frozen=True)
class Run:
    """Adjacent extents of ascending heads: what a reader decodes in one go. Made anew whenever slots change."""

    extents: tuple[Extent, ...]
    heads: tuple[int, ...]

    @cached_property
    def lens(self) -> tuple[int, ...]:
        return tuple(extent.length for extent in self.extents)

    @cached_property
    def is_uniform(self) -> bool:
        """Consecutive heads of one capacity and length: one strided view serves them all."""
        shapes = {(extent.num_pages, extent.length) for extent in self.extents}
        return len(shapes) == 1 and len(self.heads) == self.heads[-1] - self.heads[0] + 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first slot of each head within the run."""
        page_size = self.extents[0].span.page_class.page_size
        return tuple((extent.first - self.extents[0].first) * page_size for extent in self.extents)

    def views(self, x_ND: Tensor) -> Iterator[tuple[slice, tuple[int, ...], Tensor]]:
        """Heads, where they start in the run, and their [h, S, D] views: all at once if uniform; never a copy."""
        if self.is_uniform:
            heads = slice(self.heads[0], self.heads[-1] + 1)
            yield heads, self.starts, x_ND.view(len(self.heads), -1, x_ND.shape[-1])[:, : self.lens[0]]
            return
        for head, start, length in zip(self.heads, self.starts, self.lens, strict=True):
            yield slice(head, head + 1), (start,), x_ND[start : start + length].unsqueeze(0)

    @cached_property
    def floats(self) -> tuple[tuple[slice, Tensor, Tensor], ...]:
        """Heads with their keys and values [h, S, D] as they are stored, for codecs that store floats."""
        both = zip(self.views(self.side("k")["x"]), self.views(self.side("v")["x"]), strict=True)
        return tuple((heads, k_hSD, v_hSD) for (heads, _, k_hSD), (_, _, v_hSD) in both)

    def side(self, side: Side) -> Codes:
        """The codec's fields of one side, for every slot of the run, used or not."""
        return self._sides[side]

    @cached_property
    def _sides(self) -> dict[Side, Codes]:
        found: dict[Side, Codes] = {"k": {}, "v": {}}
        for side, codes in found.items():
            codes |= {name[2:]: rows for name, rows in self._fields().items() if name.startswith(f"{side}.")}
        return found

    @cached_property
    def position_N(self) -> Tensor:
        return self._fields()[POSITION.name].squeeze(-1)

    @cached_property
    def end_position(self) -> int:
        """Beyond those of all used slots; found once, for it waits for the device."""
        used = [self.position_N[start : start + length] for start, length in zip(self.starts, self.lens, strict=True)]
        return int(torch.cat(used).max()) + 1

    @cached_property
    def bias_N(self) -> Tensor | None:
        """fp32, where slots have one; undefined for those that are not used."""
        found = self._fields().get(BIAS.name)
        return None if found is None else found.squeeze(-1)

    @cached_property
    def num_pages(self) -> int:
        return sum(extent.num_pages for extent in self.extents)

    def by_page(self, item: Field) -> Tensor:
        """A field of every page of the run, used or not: [pages, elements of a page]."""
        return self._rows(item).view(self.num_pages, -1)

    def _fields(self) -> Codes:
        return {item.name: self._rows(item) for item in self.extents[0].span.page_class.fields}

    def _rows(self, item: Field) -> Tensor:
        first = self.extents[0]
        rows = first.span.page_class.rows_per_page(item)
        return first.span.fields[item.name][first.first * rows : (first.first + self.num_pages) * rows]
