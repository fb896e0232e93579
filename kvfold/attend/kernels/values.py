"""Values of a tile, weighted and added to what was there.

With one scale and zero per slot, sum p (code * scale + zero) = (p * scale).code + sum(p * zero): the second term is the
same for every channel (`even`), as is the shift that unpacking leaves in the codes. The dot rounds its weights, so the
shift is taken out with the rounded ones.

    N slots of a tile   M queries (padded)   (constants: tile.py)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.attend.kernels.tile import channels, dot, load_codes, restored
from kvfold.attend.kernels.unpack import unpack


@triton.jit
def no_values(M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr) -> tl.tuple:
    """Accumulators [WP, M] of the parts of a word."""
    parts: tl.tuple = ()
    for _ in tl.static_range(D // W):
        parts += (tl.zeros([WP, M], tl.float32),)
    return parts


@triton.jit
def add_values(
    parts: tl.tuple,
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
    """Accumulators of the parts [WP, M] and of what all channels share [N, M]; old ones shrink by `keep`."""
    words = load_codes(code, n, length, W, WP, True, MASKED)
    if FORM == "int" and GROUPS == 1:
        SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
        even = even * keep[None, :] + p * zero_n.to(tl.float32)[:, None]
        p = p * scale_n.to(tl.float32)[:, None]
        even -= SHIFT * p.to(DTYPE).to(tl.float32)
    elif FORM == "fp8":
        p = p * scale_n.to(tl.float32)[:, None]
    weight = p.to(DTYPE)
    added: tl.tuple = ()
    for PART in tl.static_range(D // W):
        v = unpack(words, PART, FORM, BITS, PLAIN)
        if FORM == "int" and GROUPS > 1:
            v = restored(v, scale, zero, n, length, PART, D, W, WP, BITS, GROUPS, 1, True)
        added += (dot(v, weight, parts[PART] * keep[None, :], PLAIN),)
    return added, even


@triton.jit
def store_values(
    out: tl.tensor,
    parts: tl.tuple,
    base: tl.tensor,
    sums: tl.tensor,
    X: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
) -> None:
    """(part + base) / sums of every channel; base, sums [M]."""
    x = tl.arange(0, sums.shape[0])
    inside = (tl.arange(0, WP) < W)[:, None] & (x < X)[None, :]
    for PART in tl.static_range(D // W):
        at = out + x[None, :] * D + channels(PART, D, W, WP)[:, None]
        tl.store(at, (parts[PART] + base[None, :]) / sums[None, :], mask=inside)
