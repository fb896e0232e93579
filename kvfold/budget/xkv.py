"""`xkv`: each further slot goes to the layer that gains most from it (XKV, arXiv:2412.05896).

What a layer has of its scores' sum after b slots per head grows ever slower with b, so the greedy choice, one slot
after the other to the layer with the largest gain, is the best one, and it is a top-k over all gains.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget
from kvfold.budget.mass import mass, ranked
from kvfold.budget.scores import Scores
from kvfold.budget.select import count_top
from kvfold.budget.uniform import even_total
from kvfold.policy.registry import register


@register(
    "budget",
    "xkv",
    paper="arXiv:2412.05896",
    cost="sort n·H·L",
    published="differs: each prompt decides, where the budgets of a first tenth are held",
)
@dataclass(frozen=True)
class Xkv(Allocator):
    """Each further slot goes to the layer whose kept share of scores gains most; heads of a layer are alike.

    gain_l(m) = sum over heads of the m-th largest unprotected score / sum of all unprotected scores of layer l. The
    layers * heads * slots_per_head slots go to the largest gains, protected slots first, equal gains to the earlier
    layer; the heads of a layer share evenly. What is not among the top K of the layers seen cannot be among the top K
    of all, so earlier layers only shrink in a stream.

    The authors run a tenth of a task's prompts first, average their layer budgets and hold them for the rest; here each
    prompt decides for itself. They work on query heads and count the window on top. Scores below 0 are shifted by the
    layer's lowest.
    """

    scope: ClassVar[Literal["layer", "model"]] = "model"

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        counts = count_top([ranked(gains(mine.score_HS), mine.score_HS) for mine in scores], total)
        return [even_total(mine, count_H.sum()) for mine, count_H in zip(scores, counts, strict=True)]


def gains(score_HS: Tensor) -> Tensor:
    """What the m-th slot of every head adds to the layer's share, the same for all heads."""
    best_HS = mass(score_HS).sort(dim=-1, descending=True).values
    whole = best_HS.sum().clamp(min=torch.finfo(best_HS.dtype).tiny)
    return (best_HS.sum(0) / whole).expand_as(best_HS)
