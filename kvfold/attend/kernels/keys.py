"""Scores of a tile of keys.

Codes go into the dots as they are. With one scale and zero per slot (GROUPS = 1), k = code * scale + zero leaves

    q.k = (q.code) * scale + sum(q) * zero

so metadata touch a [rows, slots] tile instead of every channel. Codes of 4 and 2 bits are stored in split order
(kvfold/codec/packing.py): each part of a byte is a contiguous part of the channels and has a dot of its own.

    M rows of queries (padded)   N slots of a tile   (constants: tile.py)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.attend.kernels.tile import dot, load_codes, restored
from kvfold.attend.kernels.unpack import unpack


@triton.jit
def query_parts(
    q: tl.tensor, X: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr
) -> tl.tuple:
    """The parts of a row's queries that the parts of a code byte meet, [M, WP] each, and their sums [M]."""
    q0 = _query_part(q, 0, X, M, D, W, WP)
    q1, q2, q3 = q0, q0, q0
    sum_q = tl.sum(q0.to(tl.float32), 1)
    if D > W:
        q1 = _query_part(q, 1, X, M, D, W, WP)
        sum_q += tl.sum(q1.to(tl.float32), 1)
    if D > 2 * W:
        q2 = _query_part(q, 2, X, M, D, W, WP)
        q3 = _query_part(q, 3, X, M, D, W, WP)
        sum_q += tl.sum(q2.to(tl.float32), 1) + tl.sum(q3.to(tl.float32), 1)
    return q0, q1, q2, q3, sum_q


@triton.jit
def _query_part(
    q: tl.tensor,
    PART: tl.constexpr,
    X: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
) -> tl.tensor:
    x = tl.arange(0, M)
    w = tl.arange(0, WP)
    return tl.load(q + x[:, None] * D + PART * W + w[None, :], mask=(x < X)[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def key_scores(
    q0: tl.tensor,
    q1: tl.tensor,
    q2: tl.tensor,
    q3: tl.tensor,
    sum_q: tl.tensor,
    code: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    scale_n: tl.tensor,
    zero_n: tl.tensor,
    n: tl.tensor,
    length: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """q.k of a tile, fp32 [M, N]. `scale_n`, `zero_n`: its metadata, fetched before, where a slot has one of each."""
    k0, k1, k2, k3 = unpack(load_codes(code, n, length, W, WP, True, MASKED), FORM, BITS, PLAIN)
    PARTS: tl.constexpr = D // W
    SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
    if FORM == "int" and GROUPS > 1:
        k0 = restored(k0, scale, zero, n, length, 0, D, W, WP, BITS, GROUPS, SPAN, True, MASKED)
        if PARTS > 1:
            k1 = restored(k1, scale, zero, n, length, 1, D, W, WP, BITS, GROUPS, SPAN, True, MASKED)
        if PARTS > 2:
            k2 = restored(k2, scale, zero, n, length, 2, D, W, WP, BITS, GROUPS, SPAN, True, MASKED)
            k3 = restored(k3, scale, zero, n, length, 3, D, W, WP, BITS, GROUPS, SPAN, True, MASKED)
    score = dot(q0, k0, tl.zeros([q0.shape[0], n.shape[0]], tl.float32), PLAIN)
    if PARTS > 1:
        score = dot(q1, k1, score, PLAIN)
    if PARTS > 2:
        score = dot(q3, k3, dot(q2, k2, score, PLAIN), PLAIN)
    if FORM != "float" and GROUPS == 1:
        scales = scale_n.to(tl.float32)
        score = score * scales[None, :]
        if FORM == "int":
            score += sum_q[:, None] * (zero_n.to(tl.float32) - SHIFT * scales)[None, :]
    return score
