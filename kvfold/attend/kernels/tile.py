"""Tiles of quantised slots in kernels: load codes, scales and zeros, dequantise, multiply.

Packed codes are loaded, copied to shared memory and handed to the threads as words of 16 bits: the size of a bf16
number, so a word lies where the tensor cores want the numbers made of it, and unpacking moves nothing. Each part of a
word (its bits PART * BITS and up) has a dot of its own, with the channels that lie there.

A side (keys or values) of a task is described to the compiler by the same names everywhere:

    W words of a slot's codes   WP the same padded to a power of two   FORM, BITS as in formats.py
    GROUPS scales in a row of metadata   SPAN slots that share a row   MASKED whether the tile may end early

    N slots of a tile   M queries (padded)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """total + a @ b in fp32; a comes in b's dtype, whose rounding PLAIN keeps."""
    a = a.to(b.dtype)
    if PLAIN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def channels(PART: tl.constexpr, D: tl.constexpr, W: tl.constexpr, WP: tl.constexpr) -> tl.tensor:
    """Channels [WP] whose codes lie in part PART of the words.

    Bytes are in split order (kvfold/codec/packing.py); word w has bytes 2w and 2w + 1. D = 16, 4 bits, W = 4:

        part 0: 0, 2, 4, 6    part 1: 8, 10, 12, 14    part 2: 1, 3, 5, 7    part 3: 9, 11, 13, 15
    """
    w = tl.arange(0, WP)
    if W == D:
        channel = w
    else:
        IN_BYTE: tl.constexpr = D // (2 * W)
        channel = 2 * w + PART % IN_BYTE * (2 * W) + PART // IN_BYTE
    return channel


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
    """Words [N, WP], or [WP, N] if TRANSPOSED."""
    w = tl.arange(0, WP)
    if TRANSPOSED:
        at = code + n[None, :] * W + w[:, None]
        in_slot = (w < W)[:, None]
        inside = in_slot & (n < length)[None, :]
    else:
        at = code + n[:, None] * W + w[None, :]
        in_slot = (w < W)[None, :]
        inside = in_slot & (n < length)[:, None]
    if MASKED:
        words = tl.load(at, mask=inside, other=0)
    elif WP != W:
        words = tl.load(at, mask=in_slot, other=0)
    else:
        words = tl.load(at)
    return words


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
) -> tl.tensor:
    """code * scale + zero for each channel, where channels differ in their metadata; fp32, shaped like `part`."""
    group = channels(PART, D, W, WP) // (D // GROUPS)
    if TRANSPOSED:
        at = (n // SPAN)[None, :] * GROUPS + group[:, None]
        inside = (n < length)[None, :] & (group < GROUPS)[:, None]
    else:
        at = (n // SPAN)[:, None] * GROUPS + group[None, :]
        inside = (n < length)[:, None] & (group < GROUPS)[None, :]
    scales = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    zeros = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    SHIFT: tl.constexpr = 128.0 if BITS < 8 else -128.0
    return (part.to(tl.float32) - SHIFT) * scales + zeros


@triton.jit
def elements(address: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """A byte address as an element offset. Addresses are multiples of 16; written as a product, the compiler sees it
    and loads 16 bytes at a time."""
    return address // 16 * (128 // DTYPE.primitive_bitwidth)
