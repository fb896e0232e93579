"""The same number of slots for every head of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Allocator, Budget
from kvfold.budget.bounds import bounds
from kvfold.policy.registry import register


@register("budget", "uniform")
@dataclass(frozen=True)
class Uniform(Allocator):
    """Every head keeps the same number of slots.

    A head that holds fewer (after an earlier head-wise compression) keeps all it has and the others of its layer share
    what it leaves, so that the layer keeps exactly heads x slots_per_head; a remainder goes to the lower heads.
    """

    def allocate(self, scores: Sequence[Tensor], budget: Budget, layer: int) -> list[Tensor]:
        return [even(score_HS, budget.slots_per_head) for score_HS in scores]


def even(score_HS: Tensor, slots_per_head: int) -> Tensor:
    """int64 [H]: equal counts, as far as protected and existing slots allow, that sum to H * slots_per_head."""
    return even_total(score_HS, torch.full((), slots_per_head * score_HS.shape[0], device=score_HS.device))


def even_total(score_HS: Tensor, total: Tensor) -> Tensor:
    """int64 [H]: the same for a total that only the device knows.

    What `apportion` gives for equal weights, computed where the scores are: the highest level, cut to each head's
    bounds, that the total allows; what is left goes to the first heads that can take one more.
    """
    low_H, high_H = bounds(score_HS)
    total = low_H.sum().maximum(total).minimum(high_H.sum())
    level_L = torch.arange(score_HS.shape[1] + 1, device=score_HS.device)
    used_L = level_L.unsqueeze(-1).clamp(low_H, high_H).sum(-1)
    level = (used_L <= total).sum() - 1
    count_H = level.clamp(low_H, high_H)
    grows_H = (level >= low_H) & (level < high_H)
    return count_H + (grows_H & (grows_H.cumsum(0) <= total - count_H.sum()))
