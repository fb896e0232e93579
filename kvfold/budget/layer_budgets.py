"""`dynamickv` and `xkv`: layers compete for the model's slots, heads of a layer are alike.

`dynamickv` gives a layer its share of the model's top scores (DynamicKV, arXiv:2412.14838), `xkv` each further slot to
the layer that gains most from it (XKV, arXiv:2412.05896): what a layer has of its scores' sum after b slots per head
grows ever slower with b, so the greedy choice is the best one, and it is a top-k over all gains.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Budget, ModelAllocator, Scores
from kvfold.budget.select import count_top, select_same
from kvfold.budget.shares import mass, ranked
from kvfold.budget.uniform import even_total
from kvfold.errors import PolicyError
from kvfold.policy.registry import register


@register(
    "budget", "dynamickv", paper="arXiv:2412.14838", cost="sort n·H·L",
    published="differs: all layers are counted at once, not four by four",
)  # fmt: skip
@dataclass(frozen=True)
class DynamicKV(ModelAllocator):
    """Layers get as many slots as they have among the model's best, at most `most` times the mean; heads are alike.

    c_l = how many of the layers * heads * slots_per_head highest scores of the model lie in layer l, of which only the
    top most * heads * slots_per_head compete; its heads share c_l evenly. Protected slots come first; equal scores go
    to the earlier layer, head, slot. As in `global`, layers that arrive only take slots away from earlier ones.

    The authors count every 4 layers and cut those seen so far for good (top B * layers seen, scaled up to all layers);
    a layer cut early gets nothing back when later ones need little, and the last layer takes what is left over. Here
    the count is of all layers, streamed exactly, and the model's budget is also the peak. most = 10 is their scripts'.
    """

    most: float = 10.0

    def __post_init__(self) -> None:
        if not self.most >= 1:
            raise PolicyError(f"dynamickv(most={self.most}): a layer gets at most so many times the mean, 1 or more")

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        layer_slots = len(scores[0].score_HS) * budget.slots_per_head
        competing = [_top(layer_scores.score_HS, int(self.most * layer_slots)) for layer_scores in scores]
        counts = count_top(competing, budget.num_layers * layer_slots)
        return [even_total(mine, count_H.sum()) for mine, count_H in zip(scores, counts, strict=True)]


def _top(score_HS: Tensor, count: int) -> Tensor:
    """The highest `count` scores of a layer and those that must stay; -inf elsewhere."""
    stays_HS = select_same(score_HS.view(1, -1), count).view(score_HS.shape) | (score_HS == torch.inf)
    return score_HS.where(stays_HS, -torch.inf)


@register(
    "budget", "xkv", paper="arXiv:2412.05896", cost="sort n·H·L",
    published="differs: each prompt decides, where the budgets of a first tenth are held",
)  # fmt: skip
@dataclass(frozen=True)
class Xkv(ModelAllocator):
    """Each further slot goes to the layer whose kept share of scores gains most; heads of a layer are alike.

    gain_l(m) = sum over heads of the m-th largest unprotected score / sum of all unprotected scores of layer l. The
    layers * heads * slots_per_head slots go to the largest gains, protected slots first, equal gains to the earlier
    layer; the heads of a layer share evenly. What is not among the top K of the layers seen cannot be among the top K
    of all, so earlier layers only shrink in a stream.

    The authors run a tenth of a task's prompts first, average their layer budgets and hold them for the rest; here each
    prompt decides for itself. They work on query heads and count the window on top. Scores below 0 are shifted by the
    layer's lowest.
    """

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        counts = count_top([ranked(gains(mine.score_HS), mine.score_HS) for mine in scores], total)
        return [even_total(mine, count_H.sum()) for mine, count_H in zip(scores, counts, strict=True)]


def gains(score_HS: Tensor) -> Tensor:
    """What the m-th slot of every head adds to the layer's share, the same for all heads."""
    best_HS = mass(score_HS).sort(dim=-1, descending=True).values
    whole = best_HS.sum().clamp(min=torch.finfo(best_HS.dtype).tiny)
    return (best_HS.sum(0) / whole).expand_as(best_HS)
