"""`recent`: the latest tokens (sliding window), a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View


@register("score", "recent")
@dataclass(frozen=True)
class Recent(Scorer):
    """Keep the latest tokens.

    score = position - seen. Positions alone decide, so it may drop slots between prefill chunks by default.
    """

    @property
    def default_prefill_trigger(self) -> str:
        return "between_chunks"

    def score(self, view: View) -> Tensor:
        return view.masked(recency(view))


def recency(view: View) -> Tensor:
    """Minus the age of each slot. Counted from the end, so that fp32 tells the latest 16M tokens apart."""
    return (view.position_RS - view.seen_R.unsqueeze(-1)).float()
