"""`knorm`: slots of small key norm are kept (L2 norm, arXiv:2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View


@register(
    "score",
    "knorm",
    paper="arXiv:2406.11430",
    cost="L·d",
    published="differs: the first two layers are compressed too",
)
@dataclass(frozen=True)
class KNorm(Scorer):
    """Keep the keys of smallest norm.

    score = -|k|, in fp32: norms taken in bf16 tie on most positions. No queries, no values, nothing always kept.

    As kvpress' KnormPress; the paper leaves the first two layers uncompressed, which is left to the policy.
    """

    def score(self, view: View) -> Tensor:
        return view.masked(-view.k_RSD.float().norm(dim=-1))
