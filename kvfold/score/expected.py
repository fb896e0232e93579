"""`expected`: the expected attention of future queries (Expected Attention, arXiv:2510.00636).

If queries are Gaussian, the mean of exp(q.k) has a closed form in their mean and covariance; both are measured before
RoPE on the prompt and rotated to the positions that come next. No attention map, no question needed.

    R rows   S slots   D head dim   G query heads per KV head   F future positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core import HAS_TRITON, Rope
from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.attention import masked_softmax, row_blocks
from kvfold.score.base import Needs, QueryStats, Scorer, View, given


@register(
    "score", "expected", revision=2, paper="arXiv:2510.00636", cost="L·d²",
    published="as published in kvpress, with true positions",
)  # fmt: skip
@dataclass(frozen=True)
class Expected(Scorer):
    """Keep what the next `future` queries are expected to attend to.

    z = m'.k * scale + k^T C' k * scale^2 / 2 with m', C' the mean and covariance of the pre-RoPE queries under the mean
    rotation of the next `future` positions; a = softmax of z over the slots after the first `sinks` positions; score =
    (mean of a over the group + epsilon) * |v|. The sinks are +inf.

    `covariance` and `vnorm` switch their factors off; epsilon (with vnorm) lets large values in that no query is
    expected to look for. Defaults are kvpress' ExpectedAttentionPress's, whose leaderboard runs use epsilon = 0.01. It
    uses the length of what it was last given as the position of the next token, here the true one is used; a partial
    RoPE leaves the other dims alone; prompts no longer than the sinks work. The paper's |W_o v| is |v| in both.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    vnorm: bool = True
    epsilon: float = 0.0
    least = (("sinks", 0), ("future", 1), ("epsilon", 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon and not self.vnorm:
            raise PolicyError(f"expected(epsilon={self.epsilon}, vnorm=false): epsilon only acts with vnorm=true")

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks, query_stats=True)

    def score(self, view: View) -> Tensor:
        sink_RS = view.position_RS < self.sinks
        logit_RGS = self._logits(view)
        weight_RGS = masked_softmax(logit_RGS, (view.valid_RS & ~sink_RS).unsqueeze(1))
        score_RS = weight_RGS.mean(dim=1)
        if self.vnorm:
            norm_RS = torch.linalg.vector_norm(view.v_RSD, dim=-1, dtype=torch.float32)
            score_RS = (score_RS + self.epsilon) * norm_RS
        return view.masked(score_RS.masked_fill(sink_RS, torch.inf))

    def _logits(self, view: View) -> Tensor:
        stats = given("expected", view.stats, "stats")
        if view.spec.rope is not None:
            stats = rotate_ahead(stats, view.spec.rope, view.seen_R, self.future)
        if self.covariance and view.k_RSD.is_cuda and HAS_TRITON:
            from kvfold.score.kernels import are_taken, expected_logits

            if are_taken(view.k_RSD):
                return expected_logits(view.k_RSD, stats.mean_RGD.float(), stats.cov_RGDD.float(), view.spec.scale)
        num_rows, num_slots, dim = view.k_RSD.shape
        blocks = row_blocks(num_rows, num_slots * dim)  # keys in fp32, of a few rows at a time
        return torch.cat([self._logits_of(view.k_RSD[rows].float(), stats, view.spec.scale, rows) for rows in blocks])

    def _logits_of(self, k_RSD: Tensor, stats: QueryStats, scale: float, rows: slice) -> Tensor:
        logit_RGS = torch.einsum("rgd,rsd->rgs", stats.mean_RGD[rows].float(), k_RSD) * scale
        if self.covariance:
            logit_RGS = logit_RGS + quadratic(k_RSD, stats.cov_RGDD[rows].float()) * (scale**2 / 2)
        return logit_RGS


def rotate_ahead(stats: QueryStats, rope: Rope, seen_R: Tensor, future: int) -> QueryStats:
    """The moments under the mean rotation of positions seen .. seen + future - 1: m' = M m, C' = M C M^T."""
    ahead_F = torch.arange(future, device=seen_R.device)
    angle_RFD = rope.angles(seen_R.unsqueeze(-1) + ahead_F)
    cos_RD = angle_RFD.cos().mean(dim=1) * rope.attention_scale
    sin_RD = angle_RFD.sin().mean(dim=1) * rope.attention_scale
    cos, sin = cos_RD[:, None, None], sin_RD[:, None, None]
    right_RGDD = rope.apply(stats.cov_RGDD.float(), cos, sin)  # C M^T
    cov_RGDD = rope.apply(right_RGDD.transpose(-1, -2), cos, sin).transpose(-1, -2)
    return QueryStats(rope.apply(stats.mean_RGD.float(), cos[:, 0], sin[:, 0]), cov_RGDD)


def quadratic(k_RSD: Tensor, cov_RGDD: Tensor) -> Tensor:
    """k^T C k, [R, G, S]; one query head of the group at a time, to hold one copy of the keys and not G."""
    heads = [((k_RSD @ cov_RGDD[:, g]) * k_RSD).sum(dim=-1) for g in range(cov_RGDD.shape[1])]
    return torch.stack(heads, dim=1)
