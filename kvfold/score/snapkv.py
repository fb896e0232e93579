"""`snapkv`: attention of the last queries (observation window), pooled over neighbours (SnapKV, arXiv:2404.14469).

Others read the same window: `kvcompress` sums squared weights (KV-Compress, arXiv:2410.00161), `lava_score` multiplies
by the head's largest value norm (LAVa, arXiv:2509.09754), `epicache` takes the largest weight of a patched prompt
(EpiCache, arXiv:2509.17396), `tova` averages the last query's over all heads of a layer (TOVA, arXiv:2401.06104).

    R rows   S slots   D head dim   G query heads per KV head (GQA)   W queries of the window
    B sequences   H KV heads   P positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.policy.registry import register
from kvfold.score.attention import over_window, window_attention, window_start, window_sum
from kvfold.score.base import Needs, Scorer, View, WindowScorer, one_of

Reduction = Literal["mean", "sum", "max"]
_REDUCTIONS = ("mean", "sum", "max")
_POOLS = ("avg", "max", "none")


@register(
    "score", "snapkv", revision=2, paper="arXiv:2404.14469", cost="w·L·d",
    published="differs: query heads of a group are averaged, and keep the same slots of their shared key",
)  # fmt: skip
@dataclass(frozen=True)
class SnapKV(WindowScorer):
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
        super().__post_init__()
        one_of("snapkv", "pool", self.pool, _POOLS)
        one_of("snapkv", "over_window", self.over_window, _REDUCTIONS)
        one_of("snapkv", "over_group", self.over_group, _REDUCTIONS)

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("snapkv")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        vote_RGS = self._votes(view, q_RGWD, q_position_RW)
        pooled_RGS = self._pool(vote_RGS.masked_fill(in_window_RS.unsqueeze(1), 0.0))
        score_RS = pooled_RGS.amax(1) if self.over_group == "max" else pooled_RGS.sum(1)
        if self.over_group == "mean":
            score_RS = score_RS / pooled_RGS.shape[1]
        return view.masked(score_RS.masked_fill(in_window_RS, torch.inf))

    def _votes(self, view: View, q_RGWD: Tensor, q_position_RW: Tensor) -> Tensor:
        if self.over_window == "max":
            return over_window(view, q_RGWD, q_position_RW, lambda weight_RGWS, _: weight_RGWS.amax(2))
        total_RGS = window_sum(view, q_RGWD, q_position_RW)
        count_R = (q_position_RW >= 0).sum(-1)
        return total_RGS / count_R[:, None, None] if self.over_window == "mean" else total_RGS

    def _pool(self, vote_RGS: Tensor) -> Tensor:
        if self.pool == "avg":
            return functional.avg_pool1d(vote_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        if self.pool == "max":
            return functional.max_pool1d(vote_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        return vote_RGS


@register(
    "score", "kvcompress", revision=2, paper="arXiv:2410.00161", cost="window·L·d",
    published="differs: squares of the last window alone, not of every step; budget `pages`",
)  # fmt: skip
@dataclass(frozen=True)
class KVCompress(WindowScorer):
    """Keep what the last `window` queries attend to, by the sum of squared weights.

    score = sum over the group of maxpool(sum over the window of A^2), A = softmax(q k^T * scale) over all slots, causal
    inside the window; pooling with `kernel` neighbours (1: off). The window's own slots are +inf.

    Against the authors' code: their metric lives on while decoding, adding the squares of every step, where here each
    eviction looks at the last `window` queries anew; a minimal distance between query and key is left out (their
    default is 0). They evict whole pages of all heads and layers, by the price of a page: that is the budget `pages`.
    """

    window: int = 32
    kernel: int = 7

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("kvcompress")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        vote_RGS = over_window(view, q_RGWD, q_position_RW, lambda weight_RGWS, _: weight_RGWS.square().sum(2))
        free_RGS = vote_RGS.masked_fill(in_window_RS.unsqueeze(1), 0.0)
        pooled_RGS = functional.max_pool1d(free_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        return view.masked(pooled_RGS.sum(1).masked_fill(in_window_RS, torch.inf))


@register("score", "lava_score", paper="arXiv:2509.09754", cost="w·L·d", published="as published with `lava`")
@dataclass(frozen=True)
class LavaScore(WindowScorer):
    """Keep what the last `window` queries attend to, times the head's largest |v|_1; LAVa is `lava_score + lava`.

    score = max over the group of maxpool(mean over the window of A), times max |v_j|_1 over the head's slots j before
    the window; A as in `snapkv`, pooling over `kernel` neighbours. The window's own slots are +inf.

    As the authors' code, defaults included. The factor is the same for all slots of a head, so `uniform` does not see
    it: pair the score with `lava`, which shares slots among layers by its entropy and among heads by its size.
    """

    window: int = 32
    kernel: int = 7

    def score(self, view: View) -> Tensor:
        vote_RS = SnapKV(self.window, self.kernel, pool="max", over_group="max").score(view)
        before_RS = vote_RS.isfinite()
        size_RS = torch.linalg.vector_norm(view.v_RSD, 1, dim=-1, dtype=torch.float32)
        largest_R1 = size_RS.masked_fill(~before_RS, 0.0).amax(-1, keepdim=True)
        return torch.where(before_RS, vote_RS * largest_R1, vote_RS)


@register(
    "score", "epicache", paper="arXiv:2509.17396", cost="w·L·d",
    published="as published; the method is `kvfold.Episodes`",
)  # fmt: skip
@dataclass(frozen=True)
class EpiCache(WindowScorer):
    """Keep what any of the last `window` queries attends to, judged among the slots before the window alone.

    score = maximum over group and window of softmax(q k^T * scale) over the slots before the window: a query that looks
    mostly at its own neighbours votes as loudly as any. The window's own slots are +inf.

    As the authors' code scores the past by a patched prompt: `kvfold.Episodes` reads a cluster's typical turns as the
    window, and drops them again.
    """

    window: int = 32

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("epicache")
        start_R1 = window_start(q_position_RW).unsqueeze(-1)
        # As if all queries stood just before the window, none of them sees it.
        before_RW = torch.where(q_position_RW >= 0, start_R1 - 1, -1)
        vote_RS = over_window(view, q_RGWD, before_RW, lambda weight_RGWS, _: weight_RGWS.amax((1, 2)))
        return view.masked(vote_RS.masked_fill(view.position_RS >= start_R1, torch.inf))


@register(
    "score", "tova", revision=2, paper="arXiv:2401.06104", cost="L·d",
    published="as published in kvpress: the last token stays",
)  # fmt: skip
@dataclass(frozen=True)
class TOVA(Scorer):
    """Keep what the last query attends to, on average over all heads of the layer.

    score = mean over all query heads of softmax(q k^T * scale) of the last query; every head of a sequence gets the
    same scores. The last token itself is +inf.

    As kvpress' TOVAPress. The authors' code does not force the last token and evicts at every step. Votes meet by
    position, so heads that hold different slots still vote on the same tokens (a slot a head lost gets 0 from it).
    """

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=1, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("tova")
        q_position_RW = q_position_RW[:, -1:]
        vote_RS = window_attention(view, q_RGWD[:, :, -1:], q_position_RW).squeeze(2).mean(dim=1)
        shared_RS = mean_over_heads(vote_RS, view.position_RS, view.num_heads)
        return view.masked(shared_RS.masked_fill(view.position_RS == q_position_RW, torch.inf))


def mean_over_heads(vote_RS: Tensor, position_RS: Tensor, num_heads: int) -> Tensor:
    """Votes averaged over the heads of each sequence, token by token. Padding brings 0 to position 0."""
    by_sequence = (-1, num_heads, vote_RS.shape[-1])
    vote_BHS, position_BHS = vote_RS.reshape(by_sequence), position_RS.reshape(by_sequence)
    total_BP = vote_RS.new_zeros(vote_BHS.shape[0], int(position_RS.max()) + 1)
    for head in range(num_heads):  # one head at a time: no two slots of a head share a position, so the order is fixed
        total_BP.scatter_add_(1, position_BHS[:, head], vote_BHS[:, head])
    total_BHP = total_BP.unsqueeze(1).expand(-1, num_heads, -1)
    return (total_BHP.gather(2, position_BHS) / num_heads).flatten(0, 1)
