"""`a2sf`: accumulated attention with a forgetting factor (A2SF), which removes H2O's bias towards early tokens.

R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import over_window
from kvfold.score.shared.checks import given

_FORGOTTEN = 1e-3  # share of all weight that may lie before the window


@register(
    "score",
    "a2sf",
    revision=2,
    cost="log(0.001)/log(alpha)·L·d",
    published="as published with `protect(sinks=0, recent=16)`",
)
@dataclass(frozen=True)
class A2SF(Scorer):
    """Keep what has received most attention lately: each query's votes count `alpha` times those of the next.

    score = sum over queries i of alpha^(n - i) * A_ij, summed over the group, n the last query. Queries so old that all
    of them together weigh less than 0.1 % are left out: alpha = 0.95 looks at the last 135.

    Against the authors' code: it adds up over every query, and keeps the last 16 tokens and no sinks by rule:
    `a2sf + protect(sinks=0, recent=16)`. alpha is 0.95, about the value it uses.
    """

    alpha: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 0.999:
            raise PolicyError(f"a2sf(alpha={self.alpha}): alpha must be above 0 and at most 0.999; 1 is h2o")

    @property
    def needs(self) -> Needs:
        window = max(1, math.ceil(math.log(_FORGOTTEN) / math.log(self.alpha)))
        return Needs(last_queries=window, keeps_window=False, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("a2sf", view.q_RGWD, "q_RGWD")
        q_position_RW = given("a2sf", view.q_position_RW, "q_position_RW")
        ago_W = torch.arange(q_RGWD.shape[2] - 1, -1, -1, device=q_RGWD.device)
        weight_W = self.alpha ** ago_W.float()
        return view.masked(
            over_window(view, q_RGWD, q_position_RW, lambda a_RGWS, _: torch.einsum("rgws,w->rs", a_RGWS, weight_W))
        )
