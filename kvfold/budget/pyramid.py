"""Fewer slots for higher layers (PyramidKV, arXiv:2406.02069): low layers read broadly, high layers narrowly.

H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from kvfold.budget.base import Allocator, Budget
from kvfold.budget.scores import Scores
from kvfold.budget.uniform import even
from kvfold.errors import PolicyError
from kvfold.policy.registry import register


@register("budget", "pyramid", paper="arXiv:2406.02069")
@dataclass(frozen=True)
class Pyramid(Allocator):
    """Layer budgets fall in a straight line from the first layer to the last; `beta` sets the slope.

    With B = slots_per_head, T slots stored, w = the scorer's window and n layers: lo = B / beta, hi = 2B - lo; where
    hi >= T - w, hi = T - w and lo = 2B - hi; layer i keeps hi - i * (hi - lo) / (n - 1) slots per head, window
    included. If lo < w or hi < lo the line cannot be drawn and every layer keeps B.

    Rounding: to the nearest, halves to the even number. Layers i and n - 1 - i add up to 2B before rounding and, as B
    is whole, also after it, so the model keeps exactly n * B per head. Inside a layer the heads are alike.

    As kvpress' PyramidKVPress, but B is whole there only by chance (then sums drift by rounding), and one layer alone
    keeps B, not hi. The authors' code adds the window on top, rounds the slope down, and does nothing to short prompts.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise PolicyError(f"pyramid(beta={self.beta}): beta must be at least 1 (1 is flat, 20 the paper's)")

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        stored_lens = [int(layer_scores.bounds.existing_H.max()) for layer_scores in scores]
        counts = [self.layer_slots(stored_len, budget, layer) for stored_len in stored_lens]
        return [even(layer_scores, count) for layer_scores, count in zip(scores, counts, strict=True)]

    def layer_slots(self, stored_len: int, budget: Budget, layer: int) -> int:
        """Slots per head of one layer."""
        mean = budget.slots_per_head
        low = Fraction(mean, self.beta)
        high = min(2 * mean - low, Fraction(stored_len - budget.window))
        low = 2 * mean - high
        if budget.num_layers == 1 or not high >= low >= budget.window:
            return mean
        return round(high - layer * (high - low) / (budget.num_layers - 1))
