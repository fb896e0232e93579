"""`scissorhands`: how often recent queries gave a slot less than uniform weight (Scissorhands, arXiv:2305.17118).

R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import over_window
from kvfold.score.shared.checks import at_least, given

_UNIFORM = 1 - 1e-5  # weight times t of a query that looks everywhere alike, less what softmax may round


@register(
    "score",
    "scissorhands",
    revision=2,
    paper="arXiv:2305.17118",
    cost="history·L·d",
    published="differs: `protect(sinks=0, recent=10)` as published, no larger budgets for later layers",
)
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

    def __post_init__(self) -> None:
        at_least("scissorhands", "history", self.history, 1)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.history, keeps_window=False, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("scissorhands", view.q_RGWD, "q_RGWD")
        q_position_RW = given("scissorhands", view.q_position_RW, "q_position_RW")
        seen_RWS = (view.position_RS.unsqueeze(1) <= q_position_RW.unsqueeze(-1)) & view.valid_RS.unsqueeze(1)

        def ignored(weight_RGWS: Tensor, rows: slice) -> Tensor:
            visible_RWS = seen_RWS[rows]
            low_RGWS = weight_RGWS * visible_RWS.sum(-1)[:, None, :, None] < _UNIFORM
            return (low_RGWS & visible_RWS.unsqueeze(1)).sum((1, 2)).float()

        return view.masked(-over_window(view, q_RGWD, q_position_RW, ignored))
