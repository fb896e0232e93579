"""What scorers compute of long prompts on a GPU, without the temporaries of plain operations.

`window_votes`: attention of the window's queries, summed over the window, without ever forming the map. In plain
operations a map of window x slots in fp32 is written and read ten times over; here keys are read twice: for the
log-sum-exp of every query, then for the weights (the recomputation of FlashAttention, arXiv:2205.14135).

`fused_column_max`: the largest weight each slot received from many queries, given their log-sum-exps. A program owns a
tile of slots of one query head and walks over the queries, so each key is read once and only the maxima are written.

`expected_logits`: logits that Gaussian queries are expected to give, m.k * scale + k^T C k * scale^2 / 2, in one pass
over the keys. Matrix units take 16-bit numbers: C goes in as two of them, the rounded value and what the rounding left
(16 bits of mantissa together), and sums are fp32. Plain operations would write C k in fp32 for every query head.

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window   T queries   P stretches
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # slots of a product
_STRETCH = 1024  # slots of a program of the first pass


@triton.jit
def logits(
    q: tl.tensor, k: tl.tensor, slot_position: tl.tensor, q_position: tl.tensor, valid: tl.tensor, scale: tl.tensor,
    row: tl.tensor, group: tl.tensor, slot: tl.tensor, num_groups: tl.tensor, num_queries: tl.tensor,
    num_slots: tl.tensor, k_row: tl.tensor, k_slot: tl.tensor, position_row: tl.tensor,
    D: tl.constexpr, W: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[W, slots] of one query head; -inf where a query may not look."""
    w, d = tl.arange(0, W), tl.arange(0, D)
    is_query, is_slot = w < num_queries, slot < num_slots
    at = ((row * num_groups + group) * num_queries + w).to(tl.int64)
    q_WD = tl.load(q + at[:, None] * D + d[None, :], mask=is_query[:, None], other=0.0)
    where = k + row.to(tl.int64) * k_row + slot[None, :].to(tl.int64) * k_slot + d[:, None]
    k_DS = tl.load(where, mask=is_slot[None, :], other=0.0)
    position_S = tl.load(slot_position + row.to(tl.int64) * position_row + slot, mask=is_slot, other=0)
    position_W = tl.load(q_position + row * num_queries + w, mask=is_query, other=-1)
    exists_S = tl.load(valid + row.to(tl.int64) * num_slots + slot, mask=is_slot, other=0) != 0
    sees = exists_S[None, :] & (position_S[None, :] <= position_W[:, None])
    return tl.where(sees, tl.dot(q_WD, k_DS, input_precision="ieee") * scale, float("-inf"))


@triton.jit
def lse_kernel(
    q: tl.tensor, k: tl.tensor, slot_position: tl.tensor, q_position: tl.tensor, valid: tl.tensor, lse: tl.tensor,
    scale: tl.tensor, num_groups: tl.tensor, num_queries: tl.tensor, num_slots: tl.tensor, k_row: tl.tensor,
    k_slot: tl.tensor, position_row: tl.tensor,
    D: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, STRETCH: tl.constexpr,
) -> None:  # fmt: skip
    """Log-sum-exp [R, G, P, W] of each stretch."""
    part, row, group = tl.program_id(0), tl.program_id(1) // num_groups, tl.program_id(1) % num_groups
    top = tl.full((W,), float("-inf"), tl.float32)
    total = tl.zeros((W,), tl.float32)
    for begin in range(0, STRETCH, TILE):
        slot = part * STRETCH + begin + tl.arange(0, TILE)
        x_WS = logits(
            q, k, slot_position, q_position, valid, scale, row, group, slot,
            num_groups, num_queries, num_slots, k_row, k_slot, position_row, D, W,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(x_WS, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet must not become NaN
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x_WS - shift[:, None]), 1)
        top = higher
    w = tl.arange(0, W)
    at = (tl.program_id(1) * tl.num_programs(0) + part) * num_queries + w
    seen = total > 0
    found = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + at, found, mask=w < num_queries)


@triton.jit
def vote_kernel(
    q: tl.tensor, k: tl.tensor, slot_position: tl.tensor, q_position: tl.tensor, valid: tl.tensor, lse: tl.tensor,
    vote: tl.tensor, scale: tl.tensor, num_groups: tl.tensor, num_queries: tl.tensor, num_slots: tl.tensor,
    k_row: tl.tensor, k_slot: tl.tensor, position_row: tl.tensor,
    D: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Weights summed over the window, [R, G, S]."""
    row, group = tl.program_id(1) // num_groups, tl.program_id(1) % num_groups
    slot, w = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, W)
    x_WS = logits(
        q, k, slot_position, q_position, valid, scale, row, group, slot,
        num_groups, num_queries, num_slots, k_row, k_slot, position_row, D, W,
    )  # fmt: skip
    lse_W = tl.load(lse + tl.program_id(1) * num_queries + w, mask=w < num_queries, other=0.0)
    weight_WS = tl.exp(x_WS - tl.where(lse_W == float("-inf"), 0.0, lse_W)[:, None])
    at = tl.program_id(1).to(tl.int64) * num_slots + slot
    tl.store(vote + at, tl.sum(weight_WS, 0), mask=slot < num_slots)


def are_taken(*operands: Tensor, most: int = 128) -> bool:
    """Whether the kernels take these: 16-bit numbers of one kind, a head dim that is a power of two up to `most`."""
    dim, dtypes = operands[0].shape[-1], {x.dtype for x in operands}
    is_half = dtypes in ({torch.float16}, {torch.bfloat16})
    return 16 <= dim <= most and dim & (dim - 1) == 0 and is_half


def window_votes(
    q_RGWD: Tensor, k_RSD: Tensor, position_RS: Tensor, q_position_RW: Tensor, valid_RS: Tensor, scale: float
) -> Tensor:
    """fp32 [R, G, S]: softmax of each query over the slots it may see, summed over the window."""
    num_rows, num_groups, num_queries, dim = q_RGWD.shape
    num_slots, heads = k_RSD.shape[1], num_rows * num_groups
    position_RS = position_RS if position_RS.stride(1) == 1 else position_RS.contiguous()
    k_RSD = k_RSD if k_RSD.stride(2) == 1 else k_RSD.contiguous()
    seen = (q_RGWD.contiguous(), k_RSD, position_RS, q_position_RW.contiguous(), valid_RS.to(torch.uint8).contiguous())
    sizes = (scale, num_groups, num_queries, num_slots, k_RSD.stride(0), k_RSD.stride(1), position_RS.stride(0))
    shape = {"D": dim, "W": max(16, triton.next_power_of_2(num_queries)), "TILE": _TILE}
    parts = triton.cdiv(num_slots, _STRETCH)
    lse_RGPW = torch.empty(num_rows, num_groups, parts, num_queries, device=k_RSD.device)
    lse_kernel[(parts, heads)](*seen, lse_RGPW, *sizes, **shape, STRETCH=_STRETCH)
    lse_RGW = lse_RGPW.logsumexp(2)
    vote_RGS = torch.empty(num_rows, num_groups, num_slots, device=k_RSD.device)
    vote_kernel[(triton.cdiv(num_slots, _TILE), heads)](*seen, lse_RGW, vote_RGS, *sizes, **shape)
    return vote_RGS


_SLOTS, _QUERIES = 128, 64  # of a product


@triton.jit
def columns_kernel(
    q: tl.tensor, k: tl.tensor, lse: tl.tensor, found: tl.tensor, scale: tl.tensor, num_groups: tl.tensor,
    num_queries: tl.tensor, num_slots: tl.tensor, k_row: tl.tensor, k_slot: tl.tensor,
    D: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    slot, d = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.arange(0, D)
    is_slot = slot < num_slots
    where = k + (head // num_groups) * k_row + slot[:, None].to(tl.int64) * k_slot + d[None, :]
    k_SD = tl.load(where, mask=is_slot[:, None], other=0.0)
    top_S = tl.full((SLOTS,), float("-inf"), tl.float32)
    for begin in range(0, num_queries, QUERIES):
        t = begin + tl.arange(0, QUERIES)
        is_query = t < num_queries
        at = head * num_queries + t
        q_DT = tl.load(q + at[None, :] * D + d[:, None], mask=is_query[None, :], other=0.0)
        lse_T = tl.load(lse + at, mask=is_query, other=float("inf"))  # a padded query gives nothing
        x_ST = tl.dot(k_SD, q_DT, input_precision="ieee") * scale - lse_T[None, :]
        top_S = tl.maximum(top_S, tl.max(x_ST, 1))
    tl.store(found + head * num_slots + slot, tl.exp(top_S), mask=is_slot)


def fused_column_max(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """fp32 [R, G, S]: the maximum over the queries of exp(q.k * scale - lse)."""
    num_rows, num_groups, num_queries, dim = q_RGTD.shape
    num_slots = k_RSD.shape[1]
    k_RSD = k_RSD if k_RSD.stride(2) == 1 else k_RSD.contiguous()
    found_RGS = torch.empty(num_rows, num_groups, num_slots, device=k_RSD.device)
    columns_kernel[(triton.cdiv(num_slots, _SLOTS), num_rows * num_groups)](
        q_RGTD.contiguous(), k_RSD, lse_RGT.contiguous(), found_RGS, scale, num_groups, num_queries, num_slots,
        k_RSD.stride(0), k_RSD.stride(1), D=dim, SLOTS=_SLOTS, QUERIES=_QUERIES,
    )  # fmt: skip
    return found_RGS


@triton.jit
def expected_kernel(
    k: tl.tensor, mean: tl.tensor, high: tl.tensor, low: tl.tensor, logit: tl.tensor, num_groups: tl.tensor,
    num_slots: tl.tensor, k_row: tl.tensor, k_slot: tl.tensor,
    D: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D)
    inside = slot < num_slots
    at = k + row * k_row + slot[:, None].to(tl.int64) * k_slot + d[None, :]
    k_SD = tl.load(at, mask=inside[:, None], other=0.0)
    wide_SD = k_SD.to(tl.float32)
    square = d[:, None] * D + d[None, :]
    for group in range(num_groups):
        head = row * num_groups + group
        c_SD = tl.dot(k_SD, tl.load(high + head * D * D + square), input_precision="ieee")
        c_SD += tl.dot(k_SD, tl.load(low + head * D * D + square), input_precision="ieee")
        # Scales are inside mean and C already.
        x_S = tl.sum((c_SD + tl.load(mean + head * D + d)[None, :]) * wide_SD, 1)
        tl.store(logit + head * num_slots + slot, x_S, mask=inside)


def expected_logits(k_RSD: Tensor, mean_RGD: Tensor, cov_RGDD: Tensor, scale: float) -> Tensor:
    """fp32 [R, G, S] of keys in 16 bits, mean and covariance in fp32."""
    (num_rows, num_slots, dim), num_groups = k_RSD.shape, mean_RGD.shape[1]
    k_RSD = k_RSD if k_RSD.stride(2) == 1 else k_RSD.contiguous()
    scaled = cov_RGDD * (scale**2 / 2)
    high = scaled.to(k_RSD.dtype)
    low = (scaled - high.float()).to(k_RSD.dtype)
    logit_RGS = torch.empty(num_rows, num_groups, num_slots, device=k_RSD.device)
    expected_kernel[(triton.cdiv(num_slots, _TILE), num_rows)](
        k_RSD, (mean_RGD * scale).contiguous(), high.contiguous(), low.contiguous(), logit_RGS,
        num_groups, num_slots, k_RSD.stride(0), k_RSD.stride(1), D=dim, TILE=_TILE, num_warps=8, num_stages=1,
    )  # fmt: skip
    return logit_RGS
