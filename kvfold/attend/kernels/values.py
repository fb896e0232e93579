"""Values of a tile, weighted and added to what was there.

With one scale and zero per slot, sum p (code * scale + zero) = (p * scale).code + sum(p * zero): the second term is the
same for every channel (`even`), as is the shift that unpacking leaves in the codes. The dot rounds its weights, so the
shift is taken out with the rounded ones.

    M rows of queries (padded)   N slots of a tile   (constants: tile.py)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.attend.kernels.tile import dot, load_codes, restored
from kvfold.attend.kernels.unpack import unpack


@triton.jit
def add_values(
    acc0: tl.tensor,
    acc1: tl.tensor,
    acc2: tl.tensor,
    acc3: tl.tensor,
    even: tl.tensor,
    keep: tl.tensor,
    p: tl.tensor,
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
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tuple:
    """Accumulators of the channel parts [M, WP] and of what all channels share [M, N]; old ones shrink by `keep`."""
    v0, v1, v2, v3 = unpack(load_codes(code, n, length, W, WP, False, MASKED), FORM, BITS, PLAIN)
    PARTS: tl.constexpr = D // W
    SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
    if FORM == "int" and GROUPS > 1:
        v0 = restored(v0, scale, zero, n, length, 0, D, W, WP, BITS, GROUPS, 1, False, MASKED)
        if PARTS > 1:
            v1 = restored(v1, scale, zero, n, length, 1, D, W, WP, BITS, GROUPS, 1, False, MASKED)
        if PARTS > 2:
            v2 = restored(v2, scale, zero, n, length, 2, D, W, WP, BITS, GROUPS, 1, False, MASKED)
            v3 = restored(v3, scale, zero, n, length, 3, D, W, WP, BITS, GROUPS, 1, False, MASKED)
    elif FORM == "int":
        even = even * keep[:, None] + p * zero_n.to(tl.float32)[None, :]
        p = p * scale_n.to(tl.float32)[None, :]
        even -= SHIFT * p.to(DTYPE).to(tl.float32)
    elif FORM == "fp8":
        p = p * scale_n.to(tl.float32)[None, :]
    weight = p.to(DTYPE)
    acc0 = dot(weight, v0, acc0 * keep[:, None], PLAIN)
    if PARTS > 1:
        acc1 = dot(weight, v1, acc1 * keep[:, None], PLAIN)
    if PARTS > 2:
        acc2 = dot(weight, v2, acc2 * keep[:, None], PLAIN)
        acc3 = dot(weight, v3, acc3 * keep[:, None], PLAIN)
    return acc0, acc1, acc2, acc3, even


@triton.jit
def store_part(
    out: tl.tensor, part: tl.tensor, PART: tl.constexpr, X: tl.constexpr, D: tl.constexpr, W: tl.constexpr
) -> None:
    x = tl.arange(0, part.shape[0])
    w = tl.arange(0, part.shape[1])
    tl.store(out + x[:, None] * D + PART * W + w[None, :], part, mask=(x < X)[:, None] & (w < W)[None, :])
