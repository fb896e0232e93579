"""`compactor`: leverage of keys and blockwise attention, question-agnostic, in one pass (Compactor, arXiv:2507.08143).

A causal map cannot tell how much the end of a passage is needed by what comes later; inside a block all queries see all
keys, so every token is scored by queries before and after it.

    R rows   S slots   D head dim   G query heads per KV head   T new queries   P positions   X positions of a block
    B sequences
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.policy.registry import register
from kvfold.score.attention import by_position, dots, masked_softmax, row_blocks
from kvfold.score.base import Needs, Scorer, View, given

_UNKNOWN_BLEND = 0.35  # the authors' weight where no size is known
_RIDGE = 1e-2
_POOL = 3


@register(
    "score", "compactor", paper="arXiv:2507.08143", cost="block·L·d + L·d²",
    published="differs: leverage is exact, padding takes no part",
)  # fmt: skip
@dataclass(frozen=True)
class Compactor(Scorer):
    """Keep outlying keys, and tokens that their neighbourhood attends to from both sides.

    score = blend * z(l) + z(a). Leverage l = x^T (X^T X + 0.01 I)^-1 x, X the row's keys before RoPE minus their mean.
    a = avgpool3(c * |v|), c = column sums of softmax(q k^T) inside blocks of `block` tokens, without causal mask and
    without scale, mean over the group. z = (. - mean) / std over all heads of the layer. blend is the share of slots
    that goes, unless given. The first `sinks` and the last `recent` tokens are +inf and take part in nothing.

    Against kvpress' CompactorPress: leverage is exact, in double precision, where it draws a Gaussian sketch of 48
    dims. In the last block, which is padded there, padded keys take a part of every query's softmax (its mask adds
    -1e-9, not minus infinity) and padded queries vote; here neither takes part. Slots stored by an earlier call, and
    all slots while decoding, have no queries left to vote: their z(a) is 0, the mean.
    """

    sinks: int = 8
    recent: int = 4
    block: int = 256
    blend: float | None = None
    least = (("sinks", 0), ("recent", 0), ("block", 1), ("blend", 0))

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks, recent=self.recent, new_queries=True, size=self.blend is None)

    def score(self, view: View) -> Tensor:
        q_RGTD = given("compactor", view.new_q_RGTD, "new_q_RGTD")
        seen_R1 = view.seen_R.unsqueeze(-1)
        stays_RS = (view.position_RS < self.sinks) | (view.position_RS >= seen_R1 - self.recent)
        free_RS = view.valid_RS & ~stays_RS
        voted_RS = free_RS & (view.position_RS >= seen_R1 - q_RGTD.shape[2])
        vote_RS = block_votes(view, q_RGTD, voted_RS, self.sinks, self.block)
        size_RS = torch.linalg.vector_norm(view.v_RSD, dim=-1, dtype=torch.float32)
        pooled_RS = functional.avg_pool1d((vote_RS * size_RS).masked_fill(~voted_RS, 0.0), _POOL, 1, _POOL // 2)
        unlike_RS = z_scores(leverage(view, free_RS), free_RS, view.num_heads)
        score_RS = self._blend(view) * unlike_RS + z_scores(pooled_RS, voted_RS, view.num_heads)
        return view.masked(score_RS.masked_fill(stays_RS, torch.inf))

    def _blend(self, view: View) -> Tensor | float:
        """One weight for all heads of a sequence."""
        if self.blend is not None or not view.slots_per_head:
            return _UNKNOWN_BLEND if self.blend is None else self.blend
        mean_len_B = view.len_R.view(-1, view.num_heads).float().mean(1)
        gone_B = (1 - view.slots_per_head / mean_len_B).clamp(min=0)
        return gone_B.repeat_interleave(view.num_heads).unsqueeze(-1)


def leverage(view: View, free_RS: Tensor) -> Tensor:
    """How much of its own direction each free key brings to its row: fp32 [R, S], a few rows at a time."""
    num_rows, num_slots, dim = view.k_RSD.shape
    blocks = row_blocks(num_rows, 2 * num_slots * dim)
    return torch.cat([_leverage(_before_rope(view, rows), free_RS[rows]) for rows in blocks])


def _leverage(k_RSD: Tensor, free_RS: Tensor) -> Tensor:
    free_RS1 = free_RS.unsqueeze(-1)
    k_RSD = k_RSD.double().masked_fill(~free_RS1, 0.0)
    mean_R1D = k_RSD.sum(1, keepdim=True) / free_RS1.sum(1, keepdim=True).clamp(min=1)
    x_RSD = (k_RSD - mean_R1D).masked_fill(~free_RS1, 0.0)
    ridge_DD = _RIDGE * torch.eye(x_RSD.shape[-1], dtype=torch.float64, device=x_RSD.device)
    factor_RDD = torch.linalg.cholesky(x_RSD.transpose(1, 2) @ x_RSD + ridge_DD)
    # |L^-1 x|^2 = x^T (L L^T)^-1 x
    solved_RDS: Tensor = torch.linalg.solve_triangular(factor_RDD, x_RSD.transpose(1, 2), upper=False)
    return solved_RDS.square().sum(1).float()


def _before_rope(view: View, rows: slice) -> Tensor:
    """Keys rotated back. YaRN's factor on them stays: leverage does not see what all keys share."""
    k_RSD, rope = view.k_RSD[rows].float(), view.spec.rope
    return k_RSD if rope is None else rope.rotate(k_RSD, -view.position_RS[rows])


def z_scores(x_RS: Tensor, among_RS: Tensor, num_heads: int) -> Tensor:
    """Distance from the mean in standard deviations, both over the given slots of all heads of a sequence; 0 elsewhere.

    Sums are taken in double precision, so that padding, which changes their order, does not change a choice.
    """
    by_sequence = (len(x_RS) // num_heads, -1)
    among_BX = among_RS.reshape(by_sequence)
    x_BX = x_RS.reshape(by_sequence).double().masked_fill(~among_BX, 0.0)
    count_B1 = among_BX.sum(-1, keepdim=True)
    away_BX = (x_BX - x_BX.sum(-1, keepdim=True) / count_B1.clamp(min=1)).masked_fill(~among_BX, 0.0)
    std_B1 = (away_BX.square().sum(-1, keepdim=True) / (count_B1 - 1).clamp(min=1)).sqrt()
    return (away_BX / std_B1.clamp(min=1e-6)).float().view_as(x_RS)


def block_votes(view: View, q_RGTD: Tensor, among_RS: Tensor, first: int, block: int) -> Tensor:
    """fp32 [R, S]: softmax(q.k) without scale, summed over the queries of the block, mean over the group.

    Blocks are counted from position `first`; slots that are not `among` neither vote nor are voted on.
    """
    if q_RGTD.shape[2] == 0:
        return torch.zeros_like(view.position_RS, dtype=torch.float32)
    slot_RS = torch.arange(view.k_RSD.shape[1], device=view.k_RSD.device).expand_as(view.position_RS)
    slot_RP = by_position(slot_RS.masked_fill(~among_RS, -1).float(), view, -1.0).long()
    start_R1 = view.seen_R.unsqueeze(-1) - q_RGTD.shape[2]  # position of each row's first query; below 0: padding
    earliest, end = max(int(start_R1.min()), first), slot_RP.shape[1] - 1
    vote_RP = torch.zeros_like(slot_RP, dtype=torch.float32)
    for begin in range(earliest - (earliest - first) % block, end, block):
        span = slice(begin, min(begin + block, end))
        position_X = torch.arange(span.start, span.stop, device=slot_RP.device)
        vote_RP[:, span] = _votes(view, q_RGTD, slot_RP[:, span], position_X - start_R1)
    return vote_RP.gather(1, view.position_RS)


def _votes(view: View, q_RGTD: Tensor, slot_RX: Tensor, column_RX: Tensor) -> Tensor:
    """One block: which slot each position is, -1 for none, and which column its query."""
    exists_RX = slot_RX >= 0
    slot_RXD = slot_RX.clamp(min=0).unsqueeze(-1).expand(-1, -1, view.k_RSD.shape[-1])
    k_RXD = view.k_RSD.gather(1, slot_RXD).masked_fill(~exists_RX.unsqueeze(-1), 0.0)
    index_RX = column_RX.clamp(0, q_RGTD.shape[2] - 1)
    index_RGXD = index_RX[:, None, :, None].expand(-1, q_RGTD.shape[1], -1, q_RGTD.shape[3])
    logit_RGXX = dots(q_RGTD.gather(2, index_RGXD), k_RXD)
    weight_RGXX = masked_softmax(logit_RGXX, exists_RX[:, None, None, :])
    return weight_RGXX.masked_fill(~exists_RX[:, None, :, None], 0.0).sum(2).mean(1)
