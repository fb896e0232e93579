"""Scores of a tile of keys.

Codes go into the dots as they are. With one scale and zero per slot (GROUPS = 1), k = code * scale + zero leaves

    q.k = (q.code) * scale + sum(q) * zero

so metadata touch a [slots, queries] tile instead of every channel. Slots are the rows of the dots: of a tensor core's
16 x 8 the few queries of a KV head then fill the 8.

    N slots of a tile   M queries (padded)   (constants: tile.py)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.attend.kernels.tile import channels, dot, load_codes, restored
from kvfold.attend.kernels.unpack import unpack


@triton.jit
def query_parts(
    q: tl.tensor, X: tl.constexpr, M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr
) -> tl.tuple:
    """The parts of a row's queries that the parts of a word meet, [WP, M] each, and the sums over channels [M]."""
    x = tl.arange(0, M)
    parts: tl.tuple = ()
    sums = tl.zeros([M], tl.float32)
    for PART in tl.static_range(D // W):
        inside = (tl.arange(0, WP) < W)[:, None] & (x < X)[None, :]
        part = tl.load(q + x[None, :] * D + channels(PART, D, W, WP)[:, None], mask=inside, other=0.0)
        parts += (part,)
        sums += tl.sum(part.to(tl.float32), 0)
    return parts, sums


@triton.jit
def key_scores(
    parts: tl.tuple,
    sum_q: tl.tensor,
    code: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    scale_n: tl.tensor,
    zero_n: tl.tensor,
    n: tl.tensor,
    length: tl.tensor,
    factor: tl.tensor,
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
    """q.k * factor of a tile, fp32 [N, M]; `scale_n`, `zero_n`: its metadata, fetched before, if a slot has one of
    each."""
    words = load_codes(code, n, length, W, WP, False, MASKED)
    score = tl.zeros([n.shape[0], sum_q.shape[0]], tl.float32)
    for PART in tl.static_range(D // W):
        k = unpack(words, PART, FORM, BITS, PLAIN)
        if FORM == "int" and GROUPS > 1:
            k = restored(k, scale, zero, n, length, PART, D, W, WP, BITS, GROUPS, SPAN, False)
        score = dot(k, parts[PART], score, PLAIN)
    if FORM != "float" and GROUPS == 1:
        scales = scale_n.to(tl.float32) * factor
        score = score * scales[:, None]
        if FORM == "int":
            SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
            score += sum_q[None, :] * (zero_n.to(tl.float32) * factor - SHIFT * scales)[:, None]
    else:
        score = score * factor
    return score
