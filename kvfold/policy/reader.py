"""Readers: which stored slots a decode step reads (the `attend` axis; sparse attention), and `all`.

A reader that selects declares summaries, numbers kept of each page or slot beside its code. They are computed from the
keys as they will be decoded, whenever slots are sealed or moved. At a decode step it is shown the queries and a layer's
summaries, and returns the units that each query of each KV head reads; prefill always reads everything. A unit is some
slots of a page in a row: the whole page, or as few as can be decoded alone.

    H KV heads   G query heads per KV head   T queries   D head dim   M pages   P slots of a page
    U units   W units read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvfold.policy.registry import Term, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvfold.codec.base import Field


class Summaries(Protocol):
    """What is kept of the pages of one layer."""

    def read(self, name: str) -> Tensor:
        """A field of every page: [H, M, width], or [H, M, P * width] where slots have their own."""


@dataclass(frozen=True)
class PageView:
    """What a reader sees of one layer: heads with fewer pages than M have units of no slot at the end."""

    q_HGTD: Tensor  # in the basis of the stored keys
    offset_HGT: Tensor | None  # what q.k lacks in that basis, before scaling
    scale: float  # factor on q.k
    summaries: Summaries
    used_HU: Tensor  # slots in each unit
    num_units: int  # W, less than U
    page_size: int  # P


class Reader(Term):
    """A choice of the `attend` axis. Without `selects` everything is read and no other method is called."""

    selects: ClassVar[bool] = False

    def at(self, layer: int) -> Reader:
        """The reader of one layer, counted from the bottom."""
        return self

    def summaries(self, head_dim: int, kv_dtype: torch.dtype, page_size: int) -> tuple[Field, ...]:
        """The fields kept of each page or slot; all of them are read by `select`."""
        return ()

    def summarise(self, k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
        """Rows [M, width], or [M, P, width], of each field for pages of decoded keys, fp32; unused slots hold
        anything."""
        return {}

    def unit(self, page_size: int, group: int) -> int:
        """Slots of a unit, a divisor of the page size and a multiple of the slots that a codec decodes together."""
        return page_size

    def num_units(self, unit: int) -> int:
        """W: the most units that one query of a head reads."""
        raise NotImplementedError

    def select(self, view: PageView) -> Tensor:
        """Units to read, int64 [H, T, W], none twice."""
        raise NotImplementedError


@register("attend", "all")
@dataclass(frozen=True)
class All(Reader):
    """Every stored slot is read at every step."""
