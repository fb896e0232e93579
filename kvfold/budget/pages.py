"""Heads of all layers compete page by page (KV-Compress, arXiv:2410.00161): memory is freed in whole pages, so that is
the unit in which slots should be bought.

H heads   S slots   M pages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget
from kvfold.budget.scores import Scores
from kvfold.budget.select import count_top
from kvfold.errors import PolicyError
from kvfold.policy.registry import register


@register(
    "budget",
    "pages",
    paper="arXiv:2410.00161",
    cost="sort n·H·L",
    published="differs: heads end on page boundaries",
)
@dataclass(frozen=True)
class Pages(Allocator):
    """Heads of all layers compete for pages of `size` slots; a head keeps whole pages.

    A head's slots, best first, are cut into pages; the price of one is its highest score, what giving it up would lose
    at most. The dearest pages of the model are kept, slots being counted until the layers * heads * slots_per_head of
    the budget are spent, so one page may be cut; equal prices go to the earlier layer, head, page. Protected slots come
    first, and bring the rest of their page along where the budget allows.

    As KV-Compress, seen from what stays; it counts from a head's partly filled page, so that each price buys exactly
    one page back, where here a head ends on a page boundary whatever it held. `size` should be the page size of the
    cache, or a multiple.
    """

    scope: ClassVar[Literal["layer", "model"]] = "model"
    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PolicyError(f"pages(size={self.size}): a page has at least 1 slot")

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        return count_top([self._prices(layer_scores.score_HS) for layer_scores in scores], total)

    def _prices(self, score_HS: Tensor) -> Tensor:
        """For each slot, best first, the price of its page; protected slots stay +inf, missing ones -inf."""
        best_HS = score_HS.sort(dim=-1, descending=True).values
        page_HS = best_HS[:, :: self.size].repeat_interleave(self.size, dim=1)[:, : best_HS.shape[1]]
        price_HS = page_HS.clamp(max=torch.finfo(page_HS.dtype).max)
        return torch.where(best_HS.isinf(), best_HS, price_HS)
