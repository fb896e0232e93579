"""`ada`, `global`, `pages`: heads compete for slots, those of a layer (Ada-KV, arXiv:2407.11550), of all layers (KVzip,
arXiv:2505.23416; Layer-DefensiveKV, arXiv:2510.13334), or page by page (KV-Compress, arXiv:2410.00161).

Minimising Ada-KV's bound on the error of a layer's output means keeping the layer's highest scores, whichever head
they are in: a head that looks at many places gets many slots, one that looks at few gets few. What is not among the top
K of the layers seen so far cannot be among the top K of all, so `global` is exact in a stream: each layer that arrives
only takes slots away from the earlier ones. Memory is freed in whole pages, so `pages` buys slots in that unit.

    H heads   S slots   M pages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Allocator, Budget, ModelAllocator, Scores, check_floor, floor_slots
from kvfold.budget.select import count_top
from kvfold.errors import PolicyError
from kvfold.policy.registry import register


@register(
    "budget", "ada", paper="arXiv:2407.11550", cost="sort H·L",
    published="differs: the floor comes first, where counts are mixed: a few slots",
)  # fmt: skip
@dataclass(frozen=True)
class Ada(Allocator):
    """Heads of a layer compete for its slots; each is sure of `floor` of the mean.

    Every head's top floor * n slots (rounded down, at least one) are safe, n = slots_per_head; the rest of the layer's
    H * n slots are its highest remaining scores, whichever head they are in. Protected slots count inside both.

    Against kvpress' AdaKVPress: the same rule (alpha_safeguard = floor = 0.2), but ties go to the lower head and slot,
    protected slots beat the floor, and the slots left out are freed, not masked.
    Against the authors' code: that takes the flat top first and then mixes counts, round((1 - a) * c_h + a * n), and
    leaves the window out of n; the counts differ by a few slots.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        check_floor("ada", self.floor)

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        floor_len = floor_slots(self.floor, budget)
        return [count_top([s.with_floor(floor_len)], len(s.score_HS) * budget.slots_per_head)[0] for s in scores]


@register("budget", "global", paper="arXiv:2505.23416", cost="sort n·H·L", published="as published")
@dataclass(frozen=True)
class Global(ModelAllocator):
    """Heads of all layers compete for the model's slots; each is sure of `floor` of the mean.

    One top-k over every slot of every head and layer, k = layers * heads * slots_per_head (layers of one model have
    equally many heads). Protected slots come first, then every head's top floor * n slots, then the highest scores;
    equal scores go to the earlier layer, head, slot. Until the last layer is there, the k slots are shared among those
    that are.

    Scores of different layers must mean the same thing: attention shares (snapkv, h2o, expected) do; norms (knorm) do
    not. KVzip has no floor; floor = 0 is the default here too.
    """

    floor: float = 0.0

    def __post_init__(self) -> None:
        check_floor("global", self.floor)

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        floor_len = floor_slots(self.floor, budget)
        return count_top([layer_scores.with_floor(floor_len) for layer_scores in scores], total)


@register(
    "budget", "pages", paper="arXiv:2410.00161", cost="sort n·H·L", published="differs: heads end on page boundaries"
)
@dataclass(frozen=True)
class Pages(ModelAllocator):
    """Heads of all layers compete for pages of `size` slots; a head keeps whole pages.

    A head's slots, best first, are cut into pages; the price of one is its highest score, what giving it up would lose
    at most. The dearest pages of the model are kept, slots being counted until the layers * heads * slots_per_head of
    the budget are spent, so one page may be cut; equal prices go to the earlier layer, head, page. Protected slots come
    first, and bring the rest of their page along where the budget allows.

    As KV-Compress, seen from what stays; it counts from a head's partly filled page, so that each price buys exactly
    one page back, where here a head ends on a page boundary whatever it held. `size` should be the page size of the
    cache, or a multiple.
    """

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
