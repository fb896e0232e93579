"""Attention of the window's queries, summed over the window, without ever forming the map.

In plain operations a map of window x slots in fp32 is written and read ten times over; here keys are read twice: for
the log-sum-exp of every query, then for the weights (the recomputation of FlashAttention, arXiv:2205.14135).

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window   P stretches of slots
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
    q: tl.tensor,
    k: tl.tensor,
    slot_position: tl.tensor,
    q_position: tl.tensor,
    valid: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    slot: tl.tensor,
    num_groups: tl.tensor,
    num_queries: tl.tensor,
    num_slots: tl.tensor,
    k_row: tl.tensor,
    k_slot: tl.tensor,
    position_row: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
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
    q: tl.tensor,
    k: tl.tensor,
    slot_position: tl.tensor,
    q_position: tl.tensor,
    valid: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    num_queries: tl.tensor,
    num_slots: tl.tensor,
    k_row: tl.tensor,
    k_slot: tl.tensor,
    position_row: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
) -> None:
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
    q: tl.tensor,
    k: tl.tensor,
    slot_position: tl.tensor,
    q_position: tl.tensor,
    valid: tl.tensor,
    lse: tl.tensor,
    vote: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    num_queries: tl.tensor,
    num_slots: tl.tensor,
    k_row: tl.tensor,
    k_slot: tl.tensor,
    position_row: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
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


def can_vote(q_RGWD: Tensor, k_RSD: Tensor) -> bool:
    """Whether the kernels take these: 16-bit numbers of one kind, a head dim that is a power of two up to 128."""
    dim, is_half = k_RSD.shape[-1], k_RSD.dtype in (torch.float16, torch.bfloat16)
    return 16 <= dim <= 128 and dim & (dim - 1) == 0 and is_half and k_RSD.dtype == q_RGWD.dtype


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
