"""Attention weights of the last queries (observation window) on the stored slots, recomputed for scorers.

Only W rows of the attention map are formed, so the prefill itself can stay fused (the observation window of SnapKV,
arXiv:2404.14469).

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.core import HAS_TRITON
from kvfold.score.base import View

MAX_ENTRIES = 2**25  # 128 MiB of fp32


def masked_softmax(logit: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the last dim in fp32; invisible entries get 0, and so does a row that sees nothing."""
    weight = logit.float().masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weight.masked_fill(~visible, 0.0)


def window_attention(view: View, q_RGWD: Tensor, q_position_RW: Tensor, rows: slice = slice(None)) -> Tensor:
    """fp32 [R, G, W, S] of the given rows: softmax of the queries over all slots they may see, causal in the window.

    A padded query has position -1 and sees nothing.
    """
    logit_RGWS = dots(q_RGWD[rows], view.k_RSD[rows]) * view.spec.scale
    causal_RWS = view.position_RS[rows].unsqueeze(1) <= q_position_RW[rows].unsqueeze(-1)
    visible_RWS = causal_RWS & view.valid_RS[rows].unsqueeze(1)
    return masked_softmax(logit_RGWS, visible_RWS.unsqueeze(1))


def window_sum(view: View, q_RGWD: Tensor, q_position_RW: Tensor) -> Tensor:
    """fp32 [R, G, S]: the same summed over the window, on a GPU without forming it."""
    if q_RGWD.is_cuda and HAS_TRITON:
        from kvfold.score.kernels.votes import can_vote, window_votes

        if can_vote(q_RGWD, view.k_RSD):
            slots = view.position_RS, q_position_RW, view.valid_RS
            return window_votes(q_RGWD, view.k_RSD, *slots, view.spec.scale)
    blocks = row_blocks(q_RGWD.shape[0], q_RGWD[0, ..., 0].numel() * view.k_RSD.shape[1])
    return torch.cat([window_attention(view, q_RGWD, q_position_RW, rows).sum(2) for rows in blocks])


def over_window(view: View, q_RGWD: Tensor, q_position_RW: Tensor, fold: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """`fold` of the window attention [r, G, W, S] and the rows it is of, for a few rows at a time, joined."""
    blocks = row_blocks(q_RGWD.shape[0], q_RGWD[0, ..., 0].numel() * view.k_RSD.shape[1])
    return torch.cat([fold(window_attention(view, q_RGWD, q_position_RW, rows), rows) for rows in blocks])


def dots(q_RGWD: Tensor, k_RSD: Tensor) -> Tensor:
    """q.k in fp32 [R, G, W, S]. A GPU's matrix units multiply 16-bit numbers exactly and add in fp32, so nothing is
    widened in memory there."""
    if q_RGWD.is_cuda and q_RGWD.dtype == k_RSD.dtype and q_RGWD.dtype in (torch.float16, torch.bfloat16):
        flat_RXS: Tensor = torch.bmm(q_RGWD.flatten(1, 2), k_RSD.transpose(1, 2), out_dtype=torch.float32)
        return flat_RXS.view(*q_RGWD.shape[:3], -1)
    return torch.einsum("rgwd,rsd->rgws", q_RGWD.float(), k_RSD.float())


def row_blocks(num_rows: int, entries_per_row: int) -> list[slice]:
    """Rows in blocks of at most MAX_ENTRIES (one row at least), so that a long prompt's map never stands whole."""
    step = max(1, MAX_ENTRIES // max(entries_per_row, 1))
    return [slice(first, first + step) for first in range(0, num_rows, step)]
