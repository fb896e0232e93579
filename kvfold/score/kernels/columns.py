"""The largest weight each slot received from many queries, given their log-sum-exps, without ever forming the map.

A program owns a tile of slots of one query head and walks over the queries, so each key is read once and nothing but
the maxima is written.

    R rows   S slots   D head dim   G query heads per KV head   T queries
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS, _QUERIES = 128, 64  # of a product


@triton.jit
def columns_kernel(
    q: tl.tensor,
    k: tl.tensor,
    lse: tl.tensor,
    found: tl.tensor,
    scale: tl.tensor,
    num_groups: tl.tensor,
    num_queries: tl.tensor,
    num_slots: tl.tensor,
    k_row: tl.tensor,
    k_slot: tl.tensor,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:
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


def can_take(q_RGTD: Tensor, k_RSD: Tensor) -> bool:
    """Whether the kernel takes these: 16-bit numbers of one kind, a head dim that is a power of two up to 256."""
    dim, is_half = k_RSD.shape[-1], k_RSD.dtype in (torch.float16, torch.bfloat16)
    return 16 <= dim <= 256 and dim & (dim - 1) == 0 and is_half and k_RSD.dtype == q_RGTD.dtype


def fused_column_max(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """fp32 [R, G, S]: the maximum over the queries of exp(q.k * scale - lse)."""
    num_rows, num_groups, num_queries, dim = q_RGTD.shape
    num_slots = k_RSD.shape[1]
    k_RSD = k_RSD if k_RSD.stride(2) == 1 else k_RSD.contiguous()
    found_RGS = torch.empty(num_rows, num_groups, num_slots, device=k_RSD.device)
    columns_kernel[(triton.cdiv(num_slots, _SLOTS), num_rows * num_groups)](
        q_RGTD.contiguous(),
        k_RSD,
        lse_RGT.contiguous(),
        found_RGS,
        scale,
        num_groups,
        num_queries,
        num_slots,
        k_RSD.stride(0),
        k_RSD.stride(1),
        D=dim,
        SLOTS=_SLOTS,
        QUERIES=_QUERIES,
    )
    return found_RGS
