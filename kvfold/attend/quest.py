"""`quest`: read only the pages that may hold the keys a query attends to most.

Quest (arXiv:2406.10774) keeps the smallest and largest value of every key channel for each page. No key of the page can
score higher than sum_d max(q_d * min_d, q_d * max_d), so pages are ranked by that bound and the best are read whole.
Nothing is evicted: all slots stay in memory, a step reads fewer of them.

    H KV heads   G query heads per KV head   T queries   D head dim   M pages   P slots of a page   W pages read
    C bounds of a page
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codec.base import Field
from kvfold.policy.reader import All, PageView, Reader
from kvfold.policy.registry import register


@register(
    "attend",
    "quest",
    paper="arXiv:2406.10774",
    cost="2·d per page",
    published="differs: a group shares its pages, the open block is read on top",
)
@dataclass(frozen=True)
class Quest(Reader):
    """While decoding, read the pages of about `tokens` slots whose keys may score highest; the first layers read all.

    bound of a page = max over the group's queries of (sum_d max(q_d * min_d, q_d * max_d) + offset), with q, min and
    max in the basis in which the codec stores keys, and W = ceil(tokens / page size) pages read for each KV head.

    Differences from the reference: query heads that share keys share their pages, by the largest bound among them (the
    reference has no grouped heads); the latest tokens are read from the open block, on top of `tokens`, where the
    reference keeps its last page; there is no least number of 3 pages.
    """

    selects: ClassVar[bool] = True

    tokens: int = 1024
    skip_layers: int = 2

    def validate(self) -> str | None:
        return None if self.tokens else "tokens is at least 1, not 0; leave quest out to read everything"

    def at(self, layer: int) -> Reader:
        return All() if layer < self.skip_layers else self

    def summaries(self, head_dim: int, kv_dtype: torch.dtype, page_size: int) -> tuple[Field, ...]:
        return bound_fields(head_dim, kv_dtype, page_size, page_size)

    def summarise(self, k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
        return page_bounds(k_MPD, used_MP, k_MPD.shape[1])

    def num_units(self, unit: int) -> int:
        return -(-self.tokens // unit)

    def select(self, view: PageView) -> Tensor:
        bound_HGTM = upper_bound(view.q_HGTD, view.summaries.read("min"), view.summaries.read("max"))
        if view.offset_HGT is not None:
            bound_HGTM = bound_HGTM + view.offset_HGT.unsqueeze(-1)
        bound_HTM = bound_HGTM.amax(1).masked_fill((view.used_HU == 0).unsqueeze(1), -torch.inf)
        return bound_HTM.topk(view.num_units, sorted=False).indices


def bound_fields(head_dim: int, kv_dtype: torch.dtype, page_size: int, page: int) -> tuple[Field, ...]:
    """The least and largest value of every key channel, for every `page` slots of a memory page."""
    width = -(-page_size // page) * head_dim
    return Field("min", kv_dtype, width, per="page"), Field("max", kv_dtype, width, per="page")


def page_bounds(k_MPD: Tensor, used_MP: Tensor, page: int) -> dict[str, Tensor]:
    """The rows of both fields, for every `page` slots of a memory page; those without slots hold infinities."""
    unused_MP1 = ~used_MP.unsqueeze(-1)
    more = -k_MPD.shape[1] % page

    def folded(fill: float) -> Tensor:
        k = k_MPD.masked_fill(unused_MP1, fill)
        folded_MCPD: Tensor = (pad(k, (0, 0, 0, more), value=fill) if more else k).unflatten(1, (-1, page))
        return folded_MCPD

    return {"min": folded(torch.inf).amin(2).flatten(1), "max": folded(-torch.inf).amax(2).flatten(1)}


def upper_bound(q_HGTD: Tensor, min_HMD: Tensor, max_HMD: Tensor) -> Tensor:
    """sum_d max(q_d * min_d, q_d * max_d) as [H, G, T, M]: a channel with q > 0 takes the max, the others the min."""
    low_HDM = min_HMD.to(q_HGTD.dtype).transpose(1, 2).unsqueeze(1)
    high_HDM = max_HMD.to(q_HGTD.dtype).transpose(1, 2).unsqueeze(1)
    return q_HGTD.clamp(min=0) @ high_HDM + q_HGTD.clamp(max=0) @ low_HDM
