"""Attention that slots have received so far: `h2o`, its sum (heavy hitters, H2O, arXiv:2306.14048); `a2sf`, with a
forgetting factor, which removes H2O's bias towards early tokens (A2SF); `scissorhands`, how often recent queries gave a
slot less than uniform weight (Scissorhands, arXiv:2305.17118).

    R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.attention import over_window
from kvfold.score.base import Needs, Scorer, View, given, one_of


@register(
    "score", "h2o", paper="arXiv:2306.14048", cost="L²·d, L memory",
    published="as published with `protect(sinks=0, recent=50%)`; alone another method",
)  # fmt: skip
@dataclass(frozen=True)
class H2O(Scorer):
    """Keep the slots that have received most attention so far.

    score = sum of softmax weights over all queries that could see the slot, summed over the group. Early slots had more
    queries to collect from; correction=mean divides by their number, which in turn favours the latest slots, whose mean
    rests on few queries: pair it with protected recent slots.

    Against the authors' code: it has no grouped heads, and it spends half of its budget on recent slots, no sinks by
    rule: H2O as published is `h2o + protect(sinks=0, recent=50%)`, the score alone is not. Against kvpress'
    ObservedAttentionPress: that is correction=mean.
    """

    correction: Literal["none", "mean"] = "none"

    def __post_init__(self) -> None:
        one_of("h2o", "correction", self.correction, ("none", "mean"))

    @property
    def needs(self) -> Needs:
        return Needs(mass=True)

    def score(self, view: View) -> Tensor:
        mass_RS = given("h2o", view.mass_RS, "mass_RS")
        if self.correction == "none":
            return view.masked(mass_RS)
        return view.masked(mass_RS / given("h2o", view.mass_count_RS, "mass_count_RS").clamp(min=1))


_FORGOTTEN = 1e-3  # share of all weight that may lie before the window


@register(
    "score", "a2sf", revision=2, cost="log(0.001)/log(alpha)·L·d",
    published="as published with `protect(sinks=0, recent=16)`",
)  # fmt: skip
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
        q_RGWD, q_position_RW = view.window("a2sf")
        ago_W = torch.arange(q_RGWD.shape[2] - 1, -1, -1, device=q_RGWD.device)
        weight_W = self.alpha ** ago_W.float()
        return view.masked(
            over_window(view, q_RGWD, q_position_RW, lambda a_RGWS, _: torch.einsum("rgws,w->rs", a_RGWS, weight_W))
        )


_UNIFORM = 1 - 1e-5  # weight times t of a query that looks everywhere alike, less what softmax may round


@register(
    "score", "scissorhands", revision=2, paper="arXiv:2305.17118", cost="history·L·d",
    published="differs: `protect(sinks=0, recent=10)` as published, no larger budgets for later layers",
)  # fmt: skip
@dataclass(frozen=True)
class Scissorhands(Scorer):
    """Drop the tokens that the last `history` queries ignored most often.

    score = minus the number of queries, over the group, that could see the slot and gave it less than 1/t, t the slots
    that the query saw (the uniform weight). Slots with equal counts go by position, the earlier first.

    This is the paper's rule and its history of 400. The authors' code (OPT alone) is another: it counts rows, of the
    last 100, in which the slot is above the 90th percentile. Its recent slots are `protect(sinks=0, recent=10)` here;
    its larger budgets for later layers are a matter of the `budget` axis, which has none of that shape.
    """

    history: int = 400
    least = (("history", 1),)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.history, keeps_window=False, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("scissorhands")
        seen_RWS = (view.position_RS.unsqueeze(1) <= q_position_RW.unsqueeze(-1)) & view.valid_RS.unsqueeze(1)

        def ignored(weight_RGWS: Tensor, rows: slice) -> Tensor:
            visible_RWS = seen_RWS[rows]
            low_RGWS = weight_RGWS * visible_RWS.sum(-1)[:, None, :, None] < _UNIFORM
            return (low_RGWS & visible_RWS.unsqueeze(1)).sum((1, 2)).float()

        return view.masked(-over_window(view, q_RGWD, q_position_RW, ignored))
