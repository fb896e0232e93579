"""No eviction: the baseline every policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View


@register("score", "full")
@dataclass(frozen=True)
class Full(Scorer):
    """Keep every slot: no size, no eviction."""

    keeps_all = True  # unannotated: class data, not an argument of the term

    def score(self, view: View) -> Tensor:
        return view.masked(torch.full_like(view.position_RS, torch.inf, dtype=torch.float32))
