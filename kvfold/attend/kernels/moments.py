"""Sums of queries minus a centre and of their outer products, rotated back to before RoPE, in one read of the queries.

Plain operations write the rotated queries in fp32 several times over. Here a tile is rotated in registers; products run
on tensor cores in TF32 (10 bits of mantissa, more than the 7 of bf16 queries), sums are fp32. Without the centre the
squares of a large mean would lose in these bits what varies around it. Angles are reduced to
one turn in fp64, or positions of a long prompt would lose them.

    Q query heads   T queries   D head dim   P stretches of queries
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.core import Rope

_TILE = 64  # queries of a product
_STRETCH = 1024  # queries of a program


class Sums(NamedTuple):
    sum_QD: Tensor
    outer_QDD: Tensor


@triton.jit
def moments_kernel(
    q: tl.tensor, turns: tl.tensor, centre: tl.tensor, sums: tl.tensor, outers: tl.tensor,
    start: tl.tensor, num_queries: tl.tensor, q_head: tl.tensor, q_token: tl.tensor, factor: tl.tensor,
    HALF: tl.constexpr, TILE: tl.constexpr, STRETCH: tl.constexpr, TAU: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, HALF)
    turns_i = tl.load(turns + i)  # per position, fp64
    centre_a = tl.load(centre + head * 2 * HALF + i)[None, :]
    centre_b = tl.load(centre + head * 2 * HALF + HALF + i)[None, :]
    aa = tl.zeros((HALF, HALF), tl.float32)
    ab = tl.zeros((HALF, HALF), tl.float32)
    bb = tl.zeros((HALF, HALF), tl.float32)
    sum_a = tl.zeros((HALF,), tl.float32)
    sum_b = tl.zeros((HALF,), tl.float32)
    for begin in range(0, STRETCH, TILE):
        t = part * STRETCH + begin + tl.arange(0, TILE)
        inside = (t < num_queries)[:, None]
        turn = (start + t).to(tl.float64)[:, None] * turns_i[None, :]
        angle = ((turn - tl.floor(turn)) * TAU).to(tl.float32)
        cos, sin = tl.cos(angle), tl.sin(angle)
        at = q + head * q_head + t[:, None].to(tl.int64) * q_token + i[None, :]
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
        y = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32) * factor
        a = tl.where(inside, x * cos + y * sin - centre_a, 0.0)
        b = tl.where(inside, y * cos - x * sin - centre_b, 0.0)
        aa += tl.dot(tl.trans(a), a, input_precision=PRECISION)
        ab += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        bb += tl.dot(tl.trans(b), b, input_precision=PRECISION)
        sum_a += tl.sum(a, 0)
        sum_b += tl.sum(b, 0)
    place = part * tl.num_programs(1) + head
    vector = sums + place * 2 * HALF + i
    tl.store(vector, sum_a)
    tl.store(vector + HALF, sum_b)
    square = outers + place * 4 * HALF * HALF + i[:, None] * 2 * HALF + i[None, :]
    tl.store(square, aa)
    tl.store(square + HALF, ab)
    tl.store(square + 2 * HALF * HALF, tl.trans(ab))
    tl.store(square + 2 * HALF * HALF + HALF, bb)


def can_sum(q_QTD: Tensor, rope: Rope) -> bool:
    """Whether the kernel turns these back: the whole head dim rotates by halves, of a power of two."""
    if rope.interleaved or rope.rotary_dim != q_QTD.shape[2] or q_QTD.shape[1] == 0:
        return False
    half = rope.rotary_dim // 2
    return 16 <= half <= 64 and half & (half - 1) == 0


def summed(q_QTD: Tensor, rope: Rope, start: int, centre_QD: Tensor, *, precision: str = "tf32") -> Sums:
    """Queries at positions start, start + 1, … as they were before RoPE, minus a centre: their sum and that of their
    outer products."""
    num_heads, num_queries, dim = q_QTD.shape
    q_QTD = q_QTD if q_QTD.stride(2) == 1 else q_QTD.contiguous()
    parts = triton.cdiv(num_queries, _STRETCH)
    sum_PQD = torch.empty(parts, num_heads, dim, device=q_QTD.device)
    outer_PQDD = torch.empty(parts, num_heads, dim, dim, device=q_QTD.device)
    moments_kernel[(parts, num_heads)](
        q_QTD, rope.inverse_periods(q_QTD.device), centre_QD.contiguous(), sum_PQD, outer_PQDD, start, num_queries,
        q_QTD.stride(0), q_QTD.stride(1), 1 / rope.attention_scale,
        HALF=dim // 2, TILE=_TILE, STRETCH=_STRETCH, TAU=2 * math.pi, PRECISION=precision, num_warps=8,
    )  # fmt: skip
    return Sums(sum_PQD.sum(0), outer_PQDD.sum(0))
