"""The same number of slots for every head of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Allocator, Budget
from kvfold.budget.bounds import bounds
from kvfold.budget.shares import apportion
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
    protected_H, existing_H = bounds(score_HS)
    low, high = protected_H.tolist(), existing_H.tolist()
    counts = apportion(slots_per_head * len(low), [1.0] * len(low), low, high)
    return torch.tensor(counts, dtype=torch.int64, device=score_HS.device)
