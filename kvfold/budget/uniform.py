"""`uniform`: the same number of slots for every head of every layer; `pyramid`: fewer for higher layers (PyramidKV,
arXiv:2406.02069), since low layers read broadly, high layers narrowly.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar
from warnings import warn

from torch import Tensor

from kvfold.budget.base import Allocator, Budget, Scores
from kvfold.errors import PolicyError
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
    return scores.bounds.protected_H + (scores.kept_SH <= total).sum(-2)


@register(
    "budget", "pyramid", revision=2, paper="arXiv:2406.02069",
    published="as published under `snapkv(window=8, kernel=7, pool=max)`, but for rounding",
)  # fmt: skip
@dataclass(frozen=True)
class Pyramid(Allocator):
    """Layer budgets fall in a straight line from the first layer to the last; `beta` sets the slope.

    The line is of the slots that compete, on top of the p protected ones, the score's window among them. With B =
    slots_per_head, m = B - p, T tokens and n layers: lo = m / beta, hi = 2m - lo; where hi > T - p, hi = T - p and lo =
    2m - hi; layer i keeps p + hi - i * (hi - lo) / (n - 1) slots per head. Inside a layer the heads are alike.

    Rounding: to the nearest, halves to the even number. Layers i and n - 1 - i add up to 2m before rounding and, as m
    is whole, also after it, so the model keeps exactly n * B per head; a layer that holds fewer than its share keeps
    all it has. Where nothing is left to slope, because protected slots are nearly all that fit, a warning says so.

    As the authors' code, whose window is what is protected here; it rounds the slope down, and lets all layers keep B
    where T < 2m. Their score is `snapkv(window=8, kernel=7, pool=max)`. kvpress' PyramidKVPress counts the window
    inside the line and lets every layer keep B where the line would end below it.
    """

    slopes: ClassVar[bool] = True
    beta: int = 20

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise PolicyError(f"pyramid(beta={self.beta}): beta must be at least 1 (1 is flat, 20 the paper's)")

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        (layer_scores,) = scores
        protected, existing = (int(count_H.max()) for count_H in layer_scores.bounds)
        num_tokens = budget.num_tokens or existing
        if layer == 0:
            self._warn_if_flat(num_tokens, protected, budget)
        return [even(layer_scores, self.layer_slots(num_tokens, protected, budget, layer))]

    def layer_slots(self, num_tokens: int, protected: int, budget: Budget, layer: int) -> int:
        """Slots per head of one layer."""
        mean = budget.slots_per_head - protected
        if budget.num_layers == 1 or mean <= 0:
            return budget.slots_per_head
        high = min(2 * mean - Fraction(mean, self.beta), Fraction(max(num_tokens - protected, mean)))
        return protected + round(high - layer * 2 * (high - mean) / (budget.num_layers - 1))

    def _warn_if_flat(self, num_tokens: int, protected: int, budget: Budget) -> None:
        last = budget.num_layers - 1
        ends = [self.layer_slots(num_tokens, protected, budget, layer) for layer in (0, last)]
        if self.beta > 1 and last > 0 and ends[0] == ends[1] and budget.slots_per_head < num_tokens:
            # No numbers: the same text from the same place is shown once.
            warn(
                "pyramid is uniform here: protected slots and the score's window are all that the size allows, so "
                "nothing is left to slope; take a larger size, a smaller window or protect fewer",
                stacklevel=2,
            )
