"""`h2o`: heavy hitters, the slots of largest accumulated attention mass (H2O, arXiv:2306.14048).

R rows   S slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.checks import given, one_of


@register(
    "score",
    "h2o",
    paper="arXiv:2306.14048",
    cost="L²·d, L memory",
    published="as published with `protect(sinks=0, recent=50%)`; alone another method",
)
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
