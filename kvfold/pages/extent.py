"""Adjacent KV pages: the extents that heads own, and the runs of extents that are decoded in one call; the position
shifts of a run's keys under `slot` positions.

N flat slots, head after head   D head dim   h heads of a stretch   S slots
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Field, Side
from kvfold.pages.arena import Span
from kvfold.pages.layout import BIAS, POSITION

Codes = dict[str, Tensor]  # field name -> flat rows, head after head
_MOST_PIECES = 4  # attention calls that are cheaper than rotating the keys of a row


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
    def capacities(self) -> list[int]:
        return [extent.capacity for extent in self.extents]

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

    def views(self, k_ND: Tensor, v_ND: Tensor) -> Iterator[tuple[slice, tuple[int, ...], Tensor, Tensor]]:
        """Heads, where they start in the run, and their keys and values as [h, S, D] views: all at once if uniform;
        never a copy."""
        if self.is_uniform:
            k_hSD, v_hSD = (x.view(len(self.heads), -1, x.shape[-1])[:, : self.lens[0]] for x in (k_ND, v_ND))
            yield slice(self.heads[0], self.heads[-1] + 1), self.starts, k_hSD, v_hSD
            return
        for head, start, length in zip(self.heads, self.starts, self.lens, strict=True):
            k_hSD, v_hSD = (x[start : start + length].unsqueeze(0) for x in (k_ND, v_ND))
            yield slice(head, head + 1), (start,), k_hSD, v_hSD

    @cached_property
    def floats(self) -> tuple[tuple[slice, Tensor, Tensor], ...]:
        """Heads with their keys and values [h, S, D] as they are stored, for codecs that store floats."""
        both = self.views(self.sides["k"]["x"], self.sides["v"]["x"])
        return tuple((heads, k_hSD, v_hSD) for heads, _, k_hSD, v_hSD in both)

    @cached_property
    def sides(self) -> dict[Side, Codes]:
        """The codec's fields of each side, for every slot of the run, used or not."""
        fields = self._fields().items()
        return {side: {name[2:]: rows for name, rows in fields if name.startswith(f"{side}.")} for side in SIDES}

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


class Piece(NamedTuple):
    """Adjacent slots of a stretch that appear moved alike, each head by its own distance."""

    slots: slice
    shift_h: Tensor


@dataclass
class Shifts:
    """Pieces of the stretches of one sequence, by run and first head; None where the shift changes often.

    Finding the borders reads back from the device, which a decode step should not wait for. A result holds as long as
    no slot is sealed or evicted: the run is made anew when its own slots change, and every seal moves the rest.
    """

    sealed_len: int = 0
    _found: dict[tuple[int, int], tuple[Run, list[Piece] | None]] = field(default_factory=dict)

    def pieces(self, run: Run, head: int, shift_hS: Tensor, sealed_len: int) -> list[Piece] | None:
        """The pieces of a stretch with these shifts, found once."""
        if sealed_len != self.sealed_len:
            self._found.clear()
            self.sealed_len = sealed_len
        key = (id(run), head)  # the run is kept beside it, so that no other one gets its id
        if key not in self._found:
            self._found[key] = run, find_pieces(shift_hS)
        return self._found[key][1]

    @property
    def num_bytes(self) -> int:
        return sum(piece.shift_h.nbytes for _, pieces in self._found.values() for piece in pieces or ())


def find_pieces(shift_hS: Tensor) -> list[Piece] | None:
    """Runs of equal shifts (sinks and a window have two), or None if they are many."""
    shift_Nh, count_N = torch.unique_consecutive(shift_hS.T, dim=0, return_counts=True)
    if len(shift_Nh) > _MOST_PIECES:
        return None
    counts = count_N.tolist()
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [Piece(slice(end - n, end), row_h) for end, n, row_h in zip(ends, counts, shift_Nh, strict=True)]
