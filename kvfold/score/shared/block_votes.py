"""Bidirectional attention inside blocks of a prompt: every token is scored by queries before and after it.

A causal map cannot tell how much the end of a passage is needed by what comes later; inside a block all queries see all
keys (Compactor, arXiv:2507.08143).

    R rows   S slots   D head dim   G query heads per KV head   T new queries   P positions   X positions of a block
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.score.base import View
from kvfold.score.shared.attention import dots, masked_softmax
from kvfold.score.shared.positions import by_position


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
    k_RXD = _rows_at(view.k_RSD, slot_RX).masked_fill(~exists_RX.unsqueeze(-1), 0.0)
    index_RX = column_RX.clamp(0, q_RGTD.shape[2] - 1)
    index_RGXD = index_RX[:, None, :, None].expand(-1, q_RGTD.shape[1], -1, q_RGTD.shape[3])
    logit_RGXX = dots(q_RGTD.gather(2, index_RGXD), k_RXD)
    weight_RGXX = masked_softmax(logit_RGXX, exists_RX[:, None, None, :])
    return weight_RGXX.masked_fill(~exists_RX[:, None, :, None], 0.0).sum(2).mean(1)


def _rows_at(x_RSD: Tensor, slot_RX: Tensor) -> Tensor:
    index_RXD = slot_RX.clamp(min=0).unsqueeze(-1).expand(-1, -1, x_RSD.shape[-1])
    return x_RSD.gather(1, index_RXD)
