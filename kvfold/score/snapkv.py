"""`snapkv`: attention of the last queries (observation window), pooled over neighbours (SnapKV, arXiv:2404.14469).

R rows   S slots   D head dim   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import row_blocks, window_attention, window_sum
from kvfold.score.shared.checks import at_least, given, one_of

Reduction = Literal["mean", "sum", "max"]
_REDUCTIONS = ("mean", "sum", "max")
_POOLS = ("avg", "max", "none")


@register(
    "score",
    "snapkv",
    revision=2,
    paper="arXiv:2404.14469",
    cost="w·L·d",
    published="differs: a group votes for its one stored key",
)
@dataclass(frozen=True)
class SnapKV(Scorer):
    """Keep what the last `window` queries attend to, and the window itself.

    score = over_group(pool(over_window(A))), A = softmax(q k^T * scale) of the last `window` queries over all slots,
    causal inside the window; pooling with `kernel` neighbours (stride 1, zeros beyond the ends) runs over the slots
    before the window only. The window's own slots are +inf. A prompt shorter than the window is all window.

    Against the authors' code: window 32, kernel 5 and average pooling are its helper's defaults; it sums over the
    window, which ranks alike, and selects per query head over keys repeated to all query heads, where here the group
    votes for the one stored key. Against kvpress (window 64): the same order of steps; prompts shorter than the window
    work, and padding neither votes nor is kept. Pooling runs over stored neighbours: after an earlier eviction these
    may have stood further apart.
    """

    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max", "none"] = "avg"
    over_window: Reduction = "mean"
    over_group: Reduction = "mean"

    def __post_init__(self) -> None:
        at_least("snapkv", "window", self.window, 1)
        one_of("snapkv", "pool", self.pool, _POOLS)
        one_of("snapkv", "over_window", self.over_window, _REDUCTIONS)
        one_of("snapkv", "over_group", self.over_group, _REDUCTIONS)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PolicyError(f"snapkv(kernel={self.kernel}): kernel must be odd, so that a slot is its own centre")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("snapkv", view.q_RGWD, "q_RGWD")
        q_position_RW = given("snapkv", view.q_position_RW, "q_position_RW")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        vote_RGS = self._votes(view, q_RGWD, q_position_RW)
        pooled_RGS = self._pool(vote_RGS.masked_fill(in_window_RS.unsqueeze(1), 0.0))
        score_RS = reduce(pooled_RGS, self.over_group, dim=1, count=pooled_RGS.shape[1])
        return view.masked(score_RS.masked_fill(in_window_RS, torch.inf))

    def _votes(self, view: View, q_RGWD: Tensor, q_position_RW: Tensor) -> Tensor:
        if self.over_window == "max":
            blocks = row_blocks(q_RGWD.shape[0], q_RGWD[0, ..., 0].numel() * view.k_RSD.shape[1])
            return torch.cat([window_attention(view, q_RGWD, q_position_RW, rows).amax(2) for rows in blocks])
        total_RGS = window_sum(view, q_RGWD, q_position_RW)
        count_R = (q_position_RW >= 0).sum(-1)
        return total_RGS / count_R[:, None, None] if self.over_window == "mean" else total_RGS

    def _pool(self, vote_RGS: Tensor) -> Tensor:
        if self.pool == "avg":
            return functional.avg_pool1d(vote_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        if self.pool == "max":
            return functional.max_pool1d(vote_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        return vote_RGS


def window_start(q_position_RW: Tensor) -> Tensor:
    """Position of each row's first real query; padded queries stand on the left."""
    return q_position_RW.masked_fill(q_position_RW < 0, torch.iinfo(torch.int64).max).amin(dim=-1)


def reduce(x: Tensor, how: Reduction, dim: int, count: int) -> Tensor:
    """Sum, max, or sum over `count` (the entries that are real; the others are 0)."""
    if how == "max":
        return x.amax(dim=dim)
    return x.sum(dim=dim) / count if how == "mean" else x.sum(dim=dim)
