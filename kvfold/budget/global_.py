"""`global`: heads of all layers compete for the model's slots (KVzip, arXiv:2505.23416; Layer-DefensiveKV,
arXiv:2510.13334).

What is not among the top K of the layers seen so far cannot be among the top K of all, so the choice is exact in a
stream: each layer that arrives only takes slots away from the earlier ones.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget, check_floor, floor_slots
from kvfold.budget.scores import Scores
from kvfold.budget.select import count_top
from kvfold.policy.registry import register


@register(
    "budget",
    "global",
    paper="arXiv:2505.23416",
    cost="sort n·H·L",
    published="as published",
)
@dataclass(frozen=True)
class Global(Allocator):
    """Heads of all layers compete for the model's slots; each is sure of `floor` of the mean.

    One top-k over every slot of every head and layer, k = layers * heads * slots_per_head (layers of one model have
    equally many heads). Protected slots come first, then every head's top floor * n slots, then the highest scores;
    equal scores go to the earlier layer, head, slot. Until the last layer is there, the k slots are shared among those
    that are.

    Scores of different layers must mean the same thing: attention shares (snapkv, h2o, expected) do; norms (knorm) do
    not. KVzip has no floor; floor = 0 is the default here too.
    """

    scope: ClassVar[Literal["layer", "model"]] = "model"
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_floor("global", self.floor)

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        floor_len = floor_slots(self.floor, budget)
        return count_top([layer_scores.with_floor(floor_len) for layer_scores in scores], total)
