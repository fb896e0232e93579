"""Which stored slots does a step read? The contract of the `attend` axis, and `all`.

A reader that chooses declares summaries, numbers kept of each page beside its slots. They are computed from the keys
as they will be decoded, whenever slots are sealed or moved. At a decode step it is shown the queries, looks at as much
of a layer's summaries as it needs, and returns the pages that each query of each KV head reads; prefill always reads
everything.

    H KV heads   G query heads per KV head   T queries   D head dim   M pages   P slots of a page   W pages read
    C elements of a summary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvfold.policy.registry import register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvfold.codec.base import Field


class Summaries(Protocol):
    """What is kept of the pages of one layer."""

    def read(self, name: str, element_HC: Tensor | None = None) -> Tensor:
        """A field of every page [H, M, width]; of each head these elements alone, [H, M, C], if they are given."""


@dataclass(frozen=True)
class PageView:
    """What a reader sees of one layer: heads with fewer pages than M have pages of no slot at the end."""

    q_HGTD: Tensor  # in the basis of the stored keys
    offset_HGT: Tensor | None  # what q.k lacks in that basis, before scaling
    summaries: Summaries
    used_HM: Tensor  # slots in each page
    num_pages: int  # W, less than M


class Reader:
    """A choice of the `attend` axis. Without `chooses` everything is read and no other method is called."""

    chooses: ClassVar[bool] = False

    def at(self, layer: int) -> Reader:
        """The reader of one layer, counted from the bottom."""
        return self

    def summaries(self, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        """The fields kept of each page."""
        return ()

    def summarise(self, k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
        """Rows [M, width] of each field for pages of decoded keys, fp32; unused slots hold anything."""
        return {}

    def looked_bytes(self, head_dim: int, kv_dtype: torch.dtype, num_pages: int) -> int:
        """Of a page's summaries, what `select` reads where the largest head has so many pages."""
        return sum(item.bytes() for item in self.summaries(head_dim, kv_dtype))

    def num_pages(self, page_size: int) -> int:
        """W: the most pages that one query of a head reads."""
        raise NotImplementedError

    def select(self, view: PageView) -> Tensor:
        """Pages to read, int64 [H, T, W], no page twice."""
        raise NotImplementedError


@register("attend", "all")
@dataclass(frozen=True)
class All(Reader):
    """Every stored slot is read at every step."""
