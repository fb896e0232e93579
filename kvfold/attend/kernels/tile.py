"""Tiles of quantised slots in kernels: load codes, scales and zeros, dequantise, score keys, add up values.

Packed codes are loaded, copied to shared memory and handed to the threads as words of 16 bits: the size of a bf16
number, so a word lies where the tensor cores want the numbers made of it, and unpacking moves nothing. Each part of a
word (its bits PART * BITS and up) has a dot of its own, with the channels that lie there.

A side (keys or values) of a task is described to the compiler by its `SideFormat` (formats.py), SIDE, K or V, and lies
at three pointers: codes, scales, zeros. MASKED: whether the tile may end early.

    N slots of a tile   M queries (padded)   W words of a slot's codes, WP padded to a power of two
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.attend.kernels.unpack import unpack


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """total + a @ b in fp32; a comes in b's dtype, whose rounding PLAIN keeps."""
    a = a.to(b.dtype)
    if PLAIN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def channels(PART: tl.constexpr, SIDE: tl.constexpr) -> tl.tensor:
    """Channels [WP] whose codes lie in part PART of the words.

    Bytes are in split order (kvfold/codec/packing.py); word w has bytes 2w and 2w + 1. D = 16, 4 bits, W = 4:

        part 0: 0, 2, 4, 6    part 1: 8, 10, 12, 14    part 2: 1, 3, 5, 7    part 3: 9, 11, 13, 15
    """
    w = tl.arange(0, SIDE.pad)
    W: tl.constexpr = SIDE.words
    if SIDE.head_dim == W:
        channel = w
    else:
        IN_BYTE: tl.constexpr = SIDE.head_dim // (2 * W)
        channel = 2 * w + PART % IN_BYTE * (2 * W) + PART // IN_BYTE
    return channel


@triton.jit
def elements(address: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """A byte address as an element offset. Addresses are multiples of 16; written as a product, the compiler sees it
    and loads 16 bytes at a time."""
    return address // 16 * (128 // DTYPE.primitive_bitwidth)


@triton.jit
def side_pointers(memory: tl.tensor, meta: tl.tensor, columns: tl.tensor) -> tl.tuple:
    """Codes, scales and zeros of a side, whose addresses stand in three columns of a task."""
    code = memory + elements(tl.load(columns), memory.dtype.element_ty)
    scale = meta + elements(tl.load(columns + 1), meta.dtype.element_ty)
    zero = meta + elements(tl.load(columns + 2), meta.dtype.element_ty)
    return code, scale, zero


@triton.jit
def load_codes(
    code: tl.tensor, n: tl.tensor, length: tl.tensor,
    SIDE: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Words [N, WP], or [WP, N] if TRANSPOSED."""
    W: tl.constexpr = SIDE.words
    w = tl.arange(0, SIDE.pad)
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
    elif SIDE.pad != W:
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
def load_metadata(at: tl.tuple, n: tl.tensor, length: tl.tensor, SIDE: tl.constexpr) -> tl.tuple:
    """Scales and zeros of slots that have one of each."""
    EACH: tl.constexpr = SIDE.form != "float" and SIDE.groups == 1
    return load_each(at[1], n, length, EACH), load_each(at[2], n, length, EACH and SIDE.form == "int")


@triton.jit
def restored(
    part: tl.tensor, at: tl.tuple, n: tl.tensor, length: tl.tensor,
    PART: tl.constexpr, SIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """code * scale + zero for each channel, where channels differ in their metadata; fp32, shaped like `part`."""
    GROUPS: tl.constexpr = SIDE.groups
    group = channels(PART, SIDE) // (SIDE.head_dim // GROUPS)
    if TRANSPOSED:
        place = (n // SIDE.span)[None, :] * GROUPS + group[:, None]
        inside = (n < length)[None, :] & (group < GROUPS)[:, None]
    else:
        place = (n // SIDE.span)[:, None] * GROUPS + group[None, :]
        inside = (n < length)[:, None] & (group < GROUPS)[None, :]
    scales = tl.load(at[1] + place, mask=inside, other=0.0).to(tl.float32)
    zeros = tl.load(at[2] + place, mask=inside, other=0.0).to(tl.float32)
    SHIFT: tl.constexpr = 128.0 if SIDE.bits < 8 else -128.0
    return (part.to(tl.float32) - SHIFT) * scales + zeros


@triton.jit
def query_parts(q: tl.tensor, X: tl.constexpr, M: tl.constexpr, K: tl.constexpr) -> tl.tuple:
    """The parts of a row's queries that the parts of a word meet, [WP, M] each, and the sums over channels [M]."""
    x = tl.arange(0, M)
    parts: tl.tuple = ()
    sums = tl.zeros([M], tl.float32)
    for PART in tl.static_range(K.head_dim // K.words):
        inside = (tl.arange(0, K.pad) < K.words)[:, None] & (x < X)[None, :]
        part = tl.load(q + x[None, :] * K.head_dim + channels(PART, K)[:, None], mask=inside, other=0.0)
        parts += (part,)
        sums += tl.sum(part.to(tl.float32), 0)
    return parts, sums


@triton.jit
def key_scores(
    parts: tl.tuple, sum_q: tl.tensor, at: tl.tuple, metadata: tl.tuple, n: tl.tensor, length: tl.tensor,
    factor: tl.tensor,
    K: tl.constexpr, MASKED: tl.constexpr, PLAIN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """q.k * factor of a tile, fp32 [N, M]; `metadata` were fetched before, if a slot has one of each.

    Codes go into the dots as they are. With one scale and zero per slot (K.groups = 1), k = code * scale + zero leaves

        q.k = (q.code) * scale + sum(q) * zero

    so metadata touch a [slots, queries] tile instead of every channel. Slots are the rows of the dots: of a tensor
    core's 16 x 8 the few queries of a KV head then fill the 8.
    """
    FORM: tl.constexpr = K.form
    words = load_codes(at[0], n, length, K, False, MASKED)
    score = tl.zeros([n.shape[0], sum_q.shape[0]], tl.float32)
    for PART in tl.static_range(K.head_dim // K.words):
        k = unpack(words, PART, FORM, K.bits, PLAIN)
        if FORM == "int" and K.groups > 1:
            k = restored(k, at, n, length, PART, K, False)
        score = dot(k, parts[PART], score, PLAIN)
    if FORM != "float" and K.groups == 1:
        scales = metadata[0].to(tl.float32) * factor
        score = score * scales[:, None]
        if FORM == "int":
            SHIFT: tl.constexpr = 128.0 if K.bits < 8 else -128.0
            score += sum_q[None, :] * (metadata[1].to(tl.float32) * factor - SHIFT * scales)[:, None]
    else:
        score = score * factor
    return score


@triton.jit
def no_values(M: tl.constexpr, V: tl.constexpr) -> tl.tuple:
    """Accumulators [WP, M] of the parts of a word."""
    PAD: tl.constexpr = V.pad
    parts: tl.tuple = ()
    for _ in tl.static_range(V.head_dim // V.words):
        parts += (tl.zeros([PAD, M], tl.float32),)
    return parts


@triton.jit
def add_values(
    parts: tl.tuple, even: tl.tensor, keep: tl.tensor, p: tl.tensor, at: tl.tuple, metadata: tl.tuple, n: tl.tensor,
    length: tl.tensor,
    V: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr, PLAIN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Accumulators of the parts [WP, M] and of what all channels share [N, M]; old ones shrink by `keep`.

    With one scale and zero per slot, sum p (code * scale + zero) = (p * scale).code + sum(p * zero): the second term is
    the same for every channel (`even`), as is the shift that unpacking leaves in the codes. The dot rounds its weights,
    so the shift is taken out with the rounded ones.
    """
    FORM: tl.constexpr = V.form
    words = load_codes(at[0], n, length, V, True, MASKED)
    if FORM == "int" and V.groups == 1:
        SHIFT: tl.constexpr = 128.0 if V.bits < 8 else -128.0
        even = even * keep[None, :] + p * metadata[1].to(tl.float32)[:, None]
        p = p * metadata[0].to(tl.float32)[:, None]
        even -= SHIFT * p.to(DTYPE).to(tl.float32)
    elif FORM == "fp8":
        p = p * metadata[0].to(tl.float32)[:, None]
    weight = p.to(DTYPE)
    added: tl.tuple = ()
    for PART in tl.static_range(V.head_dim // V.words):
        v = unpack(words, PART, FORM, V.bits, PLAIN)
        if FORM == "int" and V.groups > 1:
            v = restored(v, at, n, length, PART, V, True)
        added += (dot(v, weight, parts[PART] * keep[None, :], PLAIN),)
    return added, even


@triton.jit
def store_values(
    out: tl.tensor, parts: tl.tuple, base: tl.tensor, sums: tl.tensor, X: tl.constexpr, V: tl.constexpr
) -> None:
    """(part + base) / sums of every channel; base, sums [M]."""
    x = tl.arange(0, sums.shape[0])
    inside = (tl.arange(0, V.pad) < V.words)[:, None] & (x < X)[None, :]
    for PART in tl.static_range(V.head_dim // V.words):
        at = out + x[None, :] * V.head_dim + channels(PART, V)[:, None]
        tl.store(at, (parts[PART] + base[None, :]) / sums[None, :], mask=inside)
