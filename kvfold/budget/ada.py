"""`ada`: heads of a layer compete for its slots (Ada-KV, arXiv:2407.11550).

Minimising the paper's bound on the error of a layer's output means keeping the layer's highest scores, whichever head
they are in: a head that looks at many places gets many slots, one that looks at few gets few.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget, check_floor, floor_slots
from kvfold.budget.scores import Scores
from kvfold.budget.select import count_top
from kvfold.policy.registry import register


@register(
    "budget",
    "ada",
    paper="arXiv:2407.11550",
    cost="sort H·L",
    published="differs: the floor comes first, where counts are mixed: a few slots",
)
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
