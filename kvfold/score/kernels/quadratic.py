"""Logits that Gaussian queries are expected to give: m.k * scale + k^T C k * scale^2 / 2, in one pass over the keys.

Matrix units take 16-bit numbers: C goes in as two of them, the rounded value and what the rounding left (16 bits of
mantissa together), and sums are fp32. Plain operations would write C k in fp32 for every query head.

    R rows   S slots   D head dim   G query heads per KV head
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # slots; each tile reads the covariances of all query heads once


@triton.jit
def expected_kernel(
    k: tl.tensor,
    mean: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    logit: tl.tensor,
    num_groups: tl.tensor,
    num_slots: tl.tensor,
    k_row: tl.tensor,
    k_slot: tl.tensor,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
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


def can_expect(k_RSD: Tensor) -> bool:
    """Whether the kernel takes these keys: 16-bit numbers, a head dim that is a power of two up to 128."""
    dim = k_RSD.shape[-1]
    return 16 <= dim <= 128 and dim & (dim - 1) == 0 and k_RSD.dtype in (torch.float16, torch.bfloat16)


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
