"""`epicache`: largest attention of the last queries (a patched prompt) to earlier slots (EpiCache, arXiv:2509.17396).

R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import over_window
from kvfold.score.shared.checks import at_least, given
from kvfold.score.snapkv import window_start


@register(
    "score",
    "epicache",
    paper="arXiv:2509.17396",
    cost="w·L·d",
    published="as published; the method is `kvfold.Episodes`",
)
@dataclass(frozen=True)
class EpiCache(Scorer):
    """Keep what any of the last `window` queries attends to, judged among the slots before the window alone.

    score = maximum over group and window of softmax(q k^T * scale) over the slots before the window: a query that looks
    mostly at its own neighbours votes as loudly as any. The window's own slots are +inf.

    As the authors' code scores the past by a patched prompt: `kvfold.Episodes` reads a cluster's typical turns as the
    window, and drops them again.
    """

    window: int = 32

    def __post_init__(self) -> None:
        at_least("epicache", "window", self.window, 1)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("epicache", view.q_RGWD, "q_RGWD")
        q_position_RW = given("epicache", view.q_position_RW, "q_position_RW")
        start_R1 = window_start(q_position_RW).unsqueeze(-1)
        # As if all queries stood just before the window, none of them sees it.
        before_RW = torch.where(q_position_RW >= 0, start_R1 - 1, -1)
        vote_RS = over_window(view, q_RGWD, before_RW, lambda weight_RGWS, _: weight_RGWS.amax((1, 2)))
        return view.masked(vote_RS.masked_fill(view.position_RS >= start_R1, torch.inf))
