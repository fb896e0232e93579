"""`uniform`: the same number of slots for every head of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget
from kvfold.budget.scores import Scores
from kvfold.policy.registry import register


@register("budget", "uniform")
@dataclass(frozen=True)
class Uniform(Allocator):
    """Every head keeps the same number of slots.

    A head that holds fewer (after an earlier head-wise compression) keeps all it has and the others of its layer share
    what it leaves, so that the layer keeps exactly heads x slots_per_head; a remainder goes to the lower heads.
    """

    is_even: ClassVar[bool] = True

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        return [even(layer_scores, budget.slots_per_head) for layer_scores in scores]


def even(scores: Scores, slots_per_head: int) -> Tensor:
    """int64 [H]: equal counts, as far as protected and existing slots allow, that sum to H * slots_per_head."""
    return even_total(scores, slots_per_head * len(scores.score_HS))


def even_total(scores: Scores, total: int | Tensor) -> Tensor:
    """int64 [H]: the same for any total, also one that only the device knows.

    What `apportion` gives for equal weights, computed where the scores are: after the protected slots heads take turns
    until the total is reached.
    """
    return scores.bounds.protected_H + (scores.kept_SH <= total).sum(0)
