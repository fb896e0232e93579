"""`dynamickv`: a layer's slots follow its share of the model's top scores (DynamicKV, arXiv:2412.14838).

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
from kvfold.budget.scores import Scores
from kvfold.budget.select import count_top, select_same
from kvfold.budget.uniform import even_total
from kvfold.errors import PolicyError
from kvfold.policy.registry import register


@register(
    "budget",
    "dynamickv",
    paper="arXiv:2412.14838",
    cost="sort n·H·L",
    published="differs: all layers are counted at once, not four by four",
)
@dataclass(frozen=True)
class DynamicKV(Allocator):
    """Layers get as many slots as they have among the model's best, at most `most` times the mean; heads are alike.

    c_l = how many of the layers * heads * slots_per_head highest scores of the model lie in layer l, of which only the
    top most * heads * slots_per_head compete; its heads share c_l evenly. Protected slots come first; equal scores go
    to the earlier layer, head, slot. As in `global`, layers that arrive only take slots away from earlier ones.

    The authors count every 4 layers and cut those seen so far for good (top B * layers seen, scaled up to all layers);
    a layer cut early gets nothing back when later ones need little, and the last layer takes what is left over. Here
    the count is of all layers, streamed exactly, and the model's budget is also the peak. most = 10 is their scripts'.
    """

    scope: ClassVar[Literal["layer", "model"]] = "model"
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
