"""RoPE shift of queries for `slot` positions (StreamingLLM), for all shifts of a row in one launch.

A key at position p that appears at p + shift is met by the query at its own position minus shift: rotating q back by
the shift leaves stored keys as they are (StreamingLLM, arXiv:2309.17453). Angles are reduced to one turn in fp64, or
distances of a long stream would lose them.

    R rows of queries   X queries of a row   V shifts of a row   D head dim   F frequencies   M, DP padded X, D
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_shift_kernel(
    q: tl.tensor, shifts: tl.tensor, periods: tl.tensor, rotated: tl.tensor,
    V: tl.constexpr, X: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr,
    INTERLEAVED: tl.constexpr, TAU: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, M)
    d = tl.arange(0, DP)
    # Channel d rotates with `other`; the first of a pair gains from it, the second loses: a cos + b sin, b cos - a sin.
    if INTERLEAVED:
        number, is_first = d // 2, d % 2 == 0
        other = d + 1 - d % 2 * 2
    else:
        number, is_first = d % F, d < F
        other = tl.where(is_first, d + F, d - F)
    rotates = d < 2 * F
    shift = tl.load(shifts + program)
    turn = shift.to(tl.float64) * tl.load(periods + number, mask=rotates, other=0.0)
    angle = ((turn - tl.floor(turn)) * TAU).to(tl.float32)
    sine = tl.where(is_first, tl.sin(angle), -tl.sin(angle))
    row = q + (program // V * X + x)[:, None] * D
    inside = (x < X)[:, None] & (d < D)[None, :]
    mine = tl.load(row + d[None, :], mask=inside, other=0.0).to(tl.float32)
    theirs = tl.load(row + other[None, :], mask=inside & rotates[None, :], other=0.0).to(tl.float32)
    found = mine * tl.cos(angle)[None, :] + theirs * sine[None, :]
    at = rotated + (program * X + x)[:, None] * D + d[None, :]
    tl.store(at, found.to(rotated.dtype.element_ty), mask=inside)


def launch(q_RXD: Tensor, shift_RV: Tensor, period_F: Tensor, interleaved: bool) -> Tensor:
    """The operator `rotated_query`: [R * V, X, D] in q's dtype."""
    _, num_queries, head_dim = q_RXD.shape
    rotated = torch.empty(shift_RV.numel(), num_queries, head_dim, dtype=q_RXD.dtype, device=q_RXD.device)
    rope_shift_kernel[(shift_RV.numel(),)](
        q_RXD.contiguous(), shift_RV.contiguous(), period_F, rotated,
        V=shift_RV.shape[1], X=num_queries, M=triton.next_power_of_2(num_queries),
        D=head_dim, DP=triton.next_power_of_2(head_dim),
        F=len(period_F), INTERLEAVED=interleaved, TAU=2 * math.pi, num_warps=4,
    )  # fmt: skip
    return rotated
