"""What a model computes between its matrix products, each in one pass: silu(gate) * up, and the root-mean-square norm.

Rounded as the operations of transformers are: to the input's dtype between them. Only this file imports triton here.

    N rows   W width of the MLP   D channels   DP D padded to a power of two
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers of a program


@triton.jit
def gate_kernel(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, gate_row: tl.tensor, up_row: tl.tensor, width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_W = tl.load(gate + row * gate_row + w, mask=w < width, other=0.0)
    up_W = tl.load(up + row * up_row + w, mask=w < width, other=0.0)
    wide_W = gate_W.to(tl.float32)
    silu_W = (wide_W / (1.0 + tl.exp(-wide_W))).to(gate_W.dtype)
    product_W = silu_W.to(tl.float32) * up_W.to(tl.float32)
    tl.store(out + row * width + w, product_W.to(out.dtype.element_ty), mask=w < width)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Shaped like its inputs, contiguous; their rows may lie apart."""
    width = gate.shape[-1]
    gate_NW, up_NW = gate.reshape(-1, width), up.reshape(-1, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_kernel[(len(gate_NW), triton.cdiv(width, _BLOCK))](
        gate_NW, up_NW, out, gate_NW.stride(0), up_NW.stride(0), width, BLOCK=_BLOCK, num_warps=4
    )
    return out


@triton.jit
def norm_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, row_stride: tl.tensor, eps: tl.tensor,
    D: tl.constexpr, DP: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    x_D = tl.load(x + row * row_stride + d, mask=d < D, other=0.0)
    weight_D = tl.load(weight + d, mask=d < D, other=0.0)
    wide_D = x_D.to(tl.float32)
    scaled_D = (wide_D * tl.rsqrt(tl.sum(wide_D * wide_D, 0) / D + eps)).to(x_D.dtype)
    product_D = weight_D.to(tl.float32) * scaled_D.to(tl.float32)
    tl.store(out + row * D + d, product_D.to(out.dtype.element_ty), mask=d < D)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Over the last dimension; the result is contiguous."""
    dim = x.shape[-1]
    x_ND = x.reshape(-1, dim)
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight_D.dtype), device=x.device)
    padded = triton.next_power_of_2(dim)
    norm_kernel[(len(x_ND),)](
        x_ND, weight_D, out, x_ND.stride(0), eps, D=dim, DP=padded, num_warps=min(8, max(1, padded // 512))
    )
    return out
