"""Scores without attention: `knorm` (small L2 norm of keys, arXiv:2406.11430), `keydiff` (keys unlike the mean key,
arXiv:2504.15364), `lagkv` (keys and values against the next block of tokens, LagKV, arXiv:2504.04704).

    R rows   S slots   D head dim   N blocks   L slots of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.policy.registry import register
from kvfold.score.attention import row_blocks
from kvfold.score.base import Needs, Scorer, View


@register(
    "score", "knorm", paper="arXiv:2406.11430", cost="L·d", published="differs: the first two layers are compressed too"
)
@dataclass(frozen=True)
class KNorm(Scorer):
    """Keep the keys of smallest norm.

    score = -|k|, in fp32: norms taken in bf16 tie on most positions. No queries, no values, nothing always kept.

    As kvpress' KnormPress; the paper leaves the first two layers uncompressed, which is left to the policy.
    """

    def score(self, view: View) -> Tensor:
        return view.masked(-view.k_RSD.float().norm(dim=-1))


@register("score", "keydiff", paper="arXiv:2504.15364", cost="L·d", published="as published")
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Keep the keys least like the mean key.

    score = -cos(k, anchor), anchor = mean of k/|k| over the row's slots; post-RoPE keys, fp32. No queries, nothing
    always kept.

    As kvpress' KeyDiffPress on one row; padding takes no part in the anchor. The paper's blockwise form is this score
    with `between_chunks`.
    """

    def score(self, view: View) -> Tensor:
        unit_RSD = functional.normalize(view.k_RSD.float(), dim=-1).masked_fill(~view.valid_RS.unsqueeze(-1), 0.0)
        # The sum points where the mean does, and cosine does not see the length.
        anchor_RD = functional.normalize(unit_RSD.sum(dim=1), dim=-1)
        return view.masked(-torch.einsum("rsd,rd->rs", unit_RSD, anchor_RD))


@register("score", "lagkv", paper="arXiv:2504.04704", cost="L·d", published="as published in kvpress")
@dataclass(frozen=True)
class LagKV(Scorer):
    """Keep the slots whose channels spread most, measured by the range of the following `lag` slots.

    After the first `sinks` positions, slots are cut into blocks of `lag`. With min and max per channel over the next
    block, u = (x - min) / (max - min); s = softmax over the block of the standard deviation of u over the channels,
    mean of keys and values. score = rank of s inside the block / lag (with `cross` s itself, so that blocks compete).
    The last full block and what follows it have nothing to be measured by: they score 1 and more, later ones higher.
    The sinks are +inf.

    As kvpress' LagKVPress, which gives the unmeasured slots 1 each; a channel that does not vary in the next block
    divides by 1 here and by 0 there. Blocks are of stored slots: after an earlier eviction they span more positions.
    """

    sinks: int = 4
    lag: int = 128
    cross: bool = False
    least = (("sinks", 0), ("lag", 2))

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks)

    def score(self, view: View) -> Tensor:
        slot_RS = torch.arange(view.k_RSD.shape[1], device=view.k_RSD.device).expand_as(view.position_RS)
        is_sink_RS = (view.position_RS < self.sinks) & view.valid_RS
        body_RS = slot_RS - is_sink_RS.sum(-1, keepdim=True)  # place among the slots after the sinks
        body_len_R1 = (view.valid_RS & ~is_sink_RS).sum(-1, keepdim=True)
        has_next_RS = body_RS // self.lag < body_len_R1 // self.lag - 1
        measured_RS = self._measured(view, is_sink_RS.sum(-1)).gather(1, body_RS.clamp(min=0))
        age_RS = 1 + body_RS / body_len_R1.clamp(min=1)
        score_RS = torch.where(has_next_RS, measured_RS, age_RS)
        return view.masked(score_RS.masked_fill(is_sink_RS, torch.inf))

    def _measured(self, view: View, first_R: Tensor) -> Tensor:
        """[R, N * L]: scores by place after the sinks; of blocks that have no full block behind them, anything."""
        num_rows, num_slots, dim = view.k_RSD.shape
        num_blocks = -(-num_slots // self.lag)
        place = torch.arange(num_blocks * self.lag, device=first_R.device)
        index_RX = (first_R.unsqueeze(-1) + place).clamp(max=num_slots - 1)
        blocks = row_blocks(num_rows, num_slots * dim)
        spread_RNL = torch.cat([self._spread(view.k_RSD[r], index_RX[r]) for r in blocks])
        spread_RNL = (spread_RNL + torch.cat([self._spread(view.v_RSD[r], index_RX[r]) for r in blocks])) / 2
        if not self.cross:
            spread_RNL = spread_RNL.argsort(dim=-1, stable=True).argsort(-1).float() / self.lag
        return spread_RNL.flatten(1)

    def _spread(self, x_RSD: Tensor, index_RX: Tensor) -> Tensor:
        """Softmax over each block of the spread of its slots; the last block is measured by itself."""
        x_RXD = x_RSD.float().gather(1, index_RX.unsqueeze(-1).expand(-1, -1, x_RSD.shape[-1]))
        x_RNLD = x_RXD.view(len(x_RXD), -1, self.lag, x_RXD.shape[-1])
        next_RNLD = torch.cat((x_RNLD[:, 1:], x_RNLD[:, -1:]), dim=1)
        low, high = next_RNLD.aminmax(dim=2, keepdim=True)
        span = torch.where(high > low, high - low, 1.0)
        return ((x_RNLD - low) / span).std(-1).softmax(-1)
