"""What kernels do with a tile of stored slots: load its codes and metadata, restore numbers, multiply.

A side (keys or values) of a task is described to the compiler by the same names everywhere:

    W elements of a slot's codes   WP the same padded to a power of two   FORM, BITS as in formats.py
    GROUPS scales in a row of metadata   SPAN slots that share a row   MASKED whether the tile may end early

    M rows of queries (padded)   N slots of a tile
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """total + a @ b in fp32; b comes in a's dtype, whose rounding PLAIN keeps."""
    b = b.to(a.dtype)
    if PLAIN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def load_codes(
    code: tl.tensor,
    n: tl.tensor,
    length: tl.tensor,
    W: tl.constexpr,
    WP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[N, WP], or [WP, N] if TRANSPOSED."""
    w = tl.arange(0, WP)
    if TRANSPOSED:
        at = n[None, :] * W + w[:, None]
        inside = (n < length)[None, :] & (w < W)[:, None]
        in_slot = (w < W)[:, None]
    else:
        at = n[:, None] * W + w[None, :]
        inside = (n < length)[:, None] & (w < W)[None, :]
        in_slot = (w < W)[None, :]
    if MASKED:
        codes = tl.load(code + at, mask=inside, other=0)
    elif WP != W:
        codes = tl.load(code + at, mask=in_slot, other=0)
    else:
        codes = tl.load(code + at)
    return codes


@triton.jit
def load_each(meta: tl.tensor, n: tl.tensor, length: tl.tensor, IS_THERE: tl.constexpr) -> tl.tensor:
    """One number for each slot [N], 0 past the end; zeros if the codec has none."""
    each = tl.zeros([n.shape[0]], meta.dtype.element_ty)
    if IS_THERE:
        each = tl.load(meta + n, mask=n < length, other=0.0)
    return each


@triton.jit
def restored(
    part: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    n: tl.tensor,
    length: tl.tensor,
    PART: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """code * scale + zero for each channel, where channels differ in their metadata; fp32, shaped like `part`."""
    w = tl.arange(0, WP)
    group = (PART * W + w) // (D // GROUPS)
    if TRANSPOSED:
        at = (n // SPAN)[None, :] * GROUPS + group[:, None]
        mask = (n < length)[None, :] & (w < W)[:, None]
    else:
        at = (n // SPAN)[:, None] * GROUPS + group[None, :]
        mask = (n < length)[:, None] & (w < W)[None, :]
    if MASKED or WP != W:
        scales = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
        zeros = tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
    else:
        scales = tl.load(scale + at).to(tl.float32)
        zeros = tl.load(zero + at).to(tl.float32)
    SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
    return (part.to(tl.float32) - SHIFT) * scales + zeros


@triton.jit
def elements(address: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """A byte address as an element offset. Addresses are multiples of 16; written as a product, the compiler sees it
    and loads 16 bytes at a time."""
    return tl.load(address) // 16 * (128 // DTYPE.primitive_bitwidth)
