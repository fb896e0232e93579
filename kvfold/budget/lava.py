"""`lava`: layers share the model's slots by the entropy of their scores, heads by the scores (LAVa, arXiv:2509.09754).

A layer whose attention is spread out loses more when slots go than one that looks at few; entropy measures the spread,
and is known when the layer has been scored, so budgets shrink in a stream and nothing is kept until the end.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Budget, ModelAllocator, Scores, check_floor, floor_slots
from kvfold.budget.select import count_top
from kvfold.budget.shares import mass, on_host, share_free
from kvfold.policy.registry import register

_LEAST_WEIGHT = 1e-6  # a layer that looks at one slot only; shares want positive weights


@register(
    "budget", "lava", paper="arXiv:2509.09754", cost="sort n·H·L",
    published="as published under `lava_score`, but the floor comes first: a few slots",
)  # fmt: skip
@dataclass(frozen=True)
class Lava(ModelAllocator):
    """Layers share slots by the entropy of their scores, heads of a layer compete; each is sure of `floor` of the mean.

    e = -sum(p log p) / log N, where p are the scores of a layer's N unprotected slots, normalised over all its heads.
    Of the F = layers * heads * slots_per_head - protected slots that are free, layer i of those seen gets
    F * e_i / sum(e), at most what it has; the rest goes to the others. Until the last layer is there shares are rounded
    up, then by largest remainders, so the sum is exact. A layer that arrives makes F smaller and sum(e) larger: the
    shares of earlier layers only shrink. Inside a layer as `ada`, with a floor that is a share of the mean over the
    model, as the authors' code in effect has it: a floor that followed the layer's share could make a head grow.

    LAVa as published is `lava_score + lava`: its score weighs heads by their largest value, on which entropy and head
    budgets rest; under another score this is LAVa's budget alone. The authors' code mixes counts inside a layer,
    round((1 - floor) * c_h + floor * n), where here the floor comes first; counts differ by a few slots. Scores below 0
    are shifted by the layer's lowest.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        check_floor("lava", self.floor)

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        floor_len = floor_slots(self.floor, budget)
        totals = self._layer_slots(scores, budget, layer == budget.num_layers - 1)
        return [
            count_top([layer_scores.with_floor(floor_len)], total)[0]
            for layer_scores, total in zip(scores, totals, strict=True)
        ]

    def _layer_slots(self, scores: Sequence[Scores], budget: Budget, is_last: bool) -> list[int]:
        """Slots of each layer seen so far, protected ones included."""
        weights = [max(entropy, _LEAST_WEIGHT) for entropy in on_host([entropy(s.score_HS) for s in scores])]
        protected, existing = (on_host([s.bounds[i].sum() for s in scores]) for i in (0, 1))
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        return share_free(total, weights, protected, existing, exact=is_last)


def entropy(score_HS: Tensor) -> Tensor:
    """Entropy of a layer's unprotected scores over that of equal ones: from 0 (one slot has all) to 1."""
    mass_HS = mass(score_HS)
    share_HS = mass_HS / mass_HS.sum().clamp(min=torch.finfo(mass_HS.dtype).tiny)
    num_slots = score_HS.isfinite().sum().clamp(min=2)
    return -share_HS.xlogy(share_HS).sum() / num_slots.log()
