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
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
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
        if MASKED:
            return tl.load(code + at, mask=(n < length)[None, :] & (w < W)[:, None], other=0)
        if WP != W:
            return tl.load(code + at, mask=(w < W)[:, None], other=0)
        return tl.load(code + at)
    at = n[:, None] * W + w[None, :]
    if MASKED:
        return tl.load(code + at, mask=(n < length)[:, None] & (w < W)[None, :], other=0)
    if WP != W:
        return tl.load(code + at, mask=(w < W)[None, :], other=0)
    return tl.load(code + at)


@triton.jit
def load_each(meta: tl.tensor, n: tl.tensor, length: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """One number for each slot, fp32 [N]."""
    if MASKED:
        return tl.load(meta + n, mask=n < length, other=0.0).to(tl.float32)
    return tl.load(meta + n).to(tl.float32)


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
    """A byte address, a multiple of 16, as an element offset; the hint is what lets loads take 16 bytes at a time."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return tl.multiple_of(tl.load(address) // BYTES, 16 // BYTES)
