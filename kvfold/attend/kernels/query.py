"""Queries in the basis of centred keys, in one launch: Hadamard(q) and q.mean (kvfold/codec/centred.py).

The rotation is a matrix of signs, which every float holds exactly, times one factor; so the product loses nothing on
tensor cores.

    R rows   X queries of a row   D head dim   M rows of the dot (X padded)   DP D padded to a power of two
    C channels of a program
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.decode import is_plain, padded
from kvfold.attend.kernels.early import begins_early, let_next_begin
from kvfold.codec import hadamard

_CHANNELS = 32  # of a program: a whole matrix of 256 by 256 signs in fp32 fits into no shared memory


@triton.jit
def query_kernel(
    q: tl.tensor,
    mean: tl.tensor,
    signs: tl.tensor,
    rotated: tl.tensor,
    offset: tl.tensor,
    factor: tl.tensor,
    num_sharing: tl.tensor,
    X: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    C: tl.constexpr,
    PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_begin(EARLY)  # this one did not begin early, so what came before has ended
    row = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, M)
    d = tl.arange(0, DP)
    c = tl.program_id(1) * C + tl.arange(0, C)
    first_X = (row * X + x)[:, None] * D
    q_XD = tl.load(q + first_X + d[None, :], mask=(x < X)[:, None] & (d < D)[None, :], other=0.0)
    signs_DC = tl.load(signs + d[:, None] * D + c[None, :], mask=(d < D)[:, None] & (c < D)[None, :], other=0.0)
    mean_D = tl.load(mean + row // num_sharing * D + d, mask=d < D, other=0.0)
    if PLAIN:
        rotated_XC = tl.dot(q_XD.to(tl.float32), signs_DC.to(tl.float32), input_precision="ieee") * factor
    else:
        rotated_XC = tl.dot(q_XD, signs_DC, input_precision="tf32x3") * factor
    inside_XC = (x < X)[:, None] & (c < D)[None, :]
    tl.store(rotated + first_X + c[None, :], rotated_XC.to(rotated.dtype.element_ty), mask=inside_XC)
    if tl.program_id(1) == 0:
        tl.store(offset + row * X + x, tl.sum(q_XD.to(tl.float32) * mean_D[None, :], 1), mask=x < X)


def launch(q_RXD: Tensor, mean_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries in q's dtype, and q.mean, fp32 [R, X]; rows that follow one another may share a mean."""
    num_rows, num_queries, head_dim = q_RXD.shape
    rotated = torch.empty_like(q_RXD, memory_format=torch.contiguous_format)
    offset = torch.empty(num_rows, num_queries, dtype=torch.float32, device=q_RXD.device)
    width = padded(head_dim, 16)
    channels = min(width, _CHANNELS)
    query_kernel[(num_rows, width // channels)](
        q_RXD.contiguous(),
        mean_RD.contiguous(),
        hadamard.signs(head_dim, q_RXD.dtype, q_RXD.device),
        rotated,
        offset,
        hadamard.factor(head_dim),
        num_rows // len(mean_RD),
        X=num_queries,
        M=padded(num_queries, 16),
        D=head_dim,
        DP=width,
        C=channels,
        PLAIN=is_plain(q_RXD),
        EARLY=begins_early(q_RXD),
        num_warps=4,
    )
    return rotated, offset
