"""What scorers compute of attention: the observation window's map, column maxima, norms of projected values.

Only W rows of the attention map are formed, so the prefill itself can stay fused (the observation window of SnapKV,
arXiv:2404.14469).

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window   T queries
    H KV heads   M hidden dims   P positions, and one more column at the end that padding is sent to
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.core import HAS_TRITON
from kvfold.score.base import View, given

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


def window_start(q_position_RW: Tensor) -> Tensor:
    """Position of each row's first real query; padded queries stand on the left."""
    return q_position_RW.masked_fill(q_position_RW < 0, torch.iinfo(torch.int64).max).amin(dim=-1)


def window_sum(view: View, q_RGWD: Tensor, q_position_RW: Tensor) -> Tensor:
    """fp32 [R, G, S]: the same summed over the window, on a GPU without forming it."""
    if q_RGWD.is_cuda and HAS_TRITON:
        from kvfold.score.kernels import are_taken, window_votes

        if are_taken(q_RGWD, view.k_RSD):
            slots = view.position_RS, q_position_RW, view.valid_RS
            return window_votes(q_RGWD, view.k_RSD, *slots, view.spec.scale)
    return over_window(view, q_RGWD, q_position_RW, lambda weight_RGWS, _: weight_RGWS.sum(2))


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


def column_max(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """fp32 [R, G, S]: the maximum over the queries of exp(q.k * scale - lse)."""
    if q_RGTD.is_cuda and HAS_TRITON:
        from kvfold.score.kernels import are_taken, fused_column_max

        if are_taken(q_RGTD, k_RSD, most=256):
            return fused_column_max(q_RGTD, k_RSD, lse_RGT, scale)
    return column_max_reference(q_RGTD, k_RSD, lse_RGT, scale)


def column_max_reference(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """The same in plain operations, some queries at a time."""
    num_rows, num_groups, num_queries, _ = q_RGTD.shape
    num_slots = k_RSD.shape[1]
    step = max(1, MAX_ENTRIES // max(num_rows * num_groups * num_slots, 1))
    found_RGS = torch.full((num_rows, num_groups, num_slots), -torch.inf, device=q_RGTD.device)
    for begin in range(0, num_queries, step):
        tile = slice(begin, begin + step)
        logit_RGTS = dots(q_RGTD[:, :, tile], k_RSD).mul_(scale).sub_(lse_RGT[:, :, tile].unsqueeze(-1))
        found_RGS = torch.maximum(found_RGS, logit_RGTS.amax(2))
    return found_RGS.exp_()


def output_norms(term: str, view: View, order: int) -> Tensor:
    """fp32 [R, G, S]: the L1 or L2 norm of v W_o for every query head; 0 where there is no slot. Values of equal norm
    differ in what the output projection makes of them (CriticalKV, arXiv:2502.03805)."""
    wo_HGDM = given(term, view.wo_HGDM, "wo_HGDM")
    v_RSD = view.v_RSD.masked_fill(~view.valid_RS.unsqueeze(-1), 0.0)
    rows = [_row_norms(v_SD, wo_HGDM[row % view.num_heads], order) for row, v_SD in enumerate(v_RSD)]
    return torch.stack(rows)


def _row_norms(v_SD: Tensor, wo_GDM: Tensor, order: int) -> Tensor:
    """[G, S], some slots at a time: what they add to the hidden state never stands whole."""
    dtype = torch.promote_types(v_SD.dtype, wo_GDM.dtype)
    if dtype != torch.float32 and not v_SD.is_cuda:
        dtype = torch.float32  # few CPUs have 16-bit arithmetic
    num_groups, _, num_dims = wo_GDM.shape
    tiles = v_SD.to(dtype).split(max(1, MAX_ENTRIES // (num_groups * num_dims)))
    wo_GDM = wo_GDM.to(dtype)
    return torch.cat([torch.linalg.vector_norm(tile @ wo_GDM, order, -1, dtype=torch.float32) for tile in tiles], 1)


def by_position(x_RS: Tensor, view: View, fill: float) -> Tensor:
    """[R, P + 1]: the slots' numbers at their positions, `fill` where a row holds no slot. No two slots of a row share
    a position, so nothing is added up and the result is the same on every device."""
    num_positions = int(view.seen_R.max())
    x_RS = x_RS.masked_fill(~view.valid_RS, fill)
    index_RS = view.position_RS.masked_fill(~view.valid_RS, num_positions)
    return x_RS.new_full((len(x_RS), num_positions + 1), fill).scatter(1, index_RS, x_RS)
