"""Queries in the basis of centred keys, in one launch: Hadamard(q) and q.mean (kvfold/codec/hadamard.py).

The rotation is a matrix of signs, which every float holds exactly, times one factor; so the product loses nothing on
tensor cores.

    R rows   X queries of a row   N queries of all rows   D head dim   DP D padded to a power of two
    M queries and C channels of a program
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.decode import is_plain
from kvfold.attend.kernels.formats import padded
from kvfold.attend.kernels.pdl import begins_early, let_next_begin
from kvfold.codec import hadamard

_MANY = 2048  # queries: programs with more of them each load fewer signs
_CHANNELS = 32  # of a program: a whole matrix of 256 by 256 signs in fp32 fits into no shared memory


@triton.jit
def query_kernel(
    q: tl.tensor, mean: tl.tensor, signs: tl.tensor, rotated: tl.tensor, offset: tl.tensor,
    factor: tl.tensor, num_queries: tl.tensor, num_sharing: tl.tensor,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    let_next_begin(EARLY)  # this one did not begin early, so what came before has ended
    n = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d = tl.arange(0, DP)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside_MD = (n < num_queries)[:, None] & (d < D)[None, :]
    q_MD = tl.load(q + n[:, None] * D + d[None, :], mask=inside_MD, other=0.0)
    signs_DC = tl.load(signs + d[:, None] * D + c[None, :], mask=(d < D)[:, None] & (c < D)[None, :], other=0.0)
    if PLAIN:
        rotated_MC = tl.dot(q_MD.to(tl.float32), signs_DC.to(tl.float32), input_precision="ieee") * factor
    else:
        rotated_MC = tl.dot(q_MD, signs_DC, input_precision="tf32x3") * factor
    inside_MC = (n < num_queries)[:, None] & (c < D)[None, :]
    tl.store(rotated + n[:, None] * D + c[None, :], rotated_MC.to(rotated.dtype.element_ty), mask=inside_MC)
    if tl.program_id(1) == 0:
        mean_MD = tl.load(mean + (n // num_sharing)[:, None] * D + d[None, :], mask=inside_MD, other=0.0)
        tl.store(offset + n, tl.sum(q_MD.to(tl.float32) * mean_MD, 1), mask=n < num_queries)


def launch(q_RXD: Tensor, mean_RD: Tensor) -> tuple[Tensor, Tensor]:
    """The operator `centred_query`."""
    *shape, head_dim = q_RXD.shape
    num_queries = math.prod(shape)
    rotated = torch.empty_like(q_RXD, memory_format=torch.contiguous_format)
    offset = torch.empty(shape, dtype=torch.float32, device=q_RXD.device)
    width = padded(head_dim, 16)
    queries, channels = 64 if num_queries >= _MANY else 16, min(width, _CHANNELS)
    query_kernel[(triton.cdiv(num_queries, queries), width // channels)](
        q_RXD.contiguous(), mean_RD.contiguous(), hadamard.signs(head_dim, q_RXD.dtype, q_RXD.device), rotated, offset,
        hadamard.factor(head_dim), num_queries, num_queries // len(mean_RD),
        M=queries, D=head_dim, DP=width, C=channels, PLAIN=is_plain(q_RXD), EARLY=begins_early(q_RXD), num_warps=4,
    )  # fmt: skip
    return rotated, offset
