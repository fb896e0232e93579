"""Quantise and pack on a GPU (int8, int4, int2, kivi, fp8): the arithmetic of the codecs, step by step.

Rotations are products with the signs of the Hadamard matrix instead of butterflies, so a code may differ by one where a
number lies within fp32 rounding of the border between two. Signs are exact in bf16, and three bf16 numbers hold an fp32
one, so nothing is lost on tensor cores, and a processor has room for several programs. All else gives the same bits,
which is why kernels divide to the nearest and are not to fuse products with sums (UNFUSED).

A side (keys or values) is described to the compiler by its `Encoding` (encodings.py), K or V.

    B slots   D head dim (a power of two)   W bytes of a code   R rows of grids   G grids of a row
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.codec import fp8, grid

_HALF = tl.constexpr(grid.HALF)
_LARGEST = tl.constexpr(grid.LARGEST)
_LARGEST_FP8 = tl.constexpr(fp8.LARGEST)
UNFUSED = {"enable_fp_fusion": False}  # of the launch of a kernel


@triton.jit
def _finite(x_BD: tl.tensor) -> tl.tensor:
    """NaN becomes 0, infinity the slot's largest finite magnitude."""
    x = tl.where(x_BD != x_BD, 0.0, x_BD)
    size = tl.abs(x)
    reach_B1 = tl.minimum(tl.max(tl.where(size == float("inf"), 0.0, size), axis=1), _LARGEST)[:, None]
    return tl.minimum(tl.maximum(x, -reach_B1), reach_B1)


@triton.jit
def _up_to_bf16(x: tl.tensor) -> tl.tensor:
    """The smallest bf16 number that is not below x, in fp32: cut the lower half, carrying for positive numbers."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits + 0xFFFF, bits) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _steps(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """x in steps of the scale; a scale of 0 counts as 1."""
    return tl.math.div_rn(x, tl.where(scale > 0, scale, 1.0))


@triton.jit
def _to_e4m3(x: tl.tensor) -> tl.tensor:
    """int32 codes of numbers within the format's range, ties to even. Not every device can convert.

    A normal number is cut to three bits of mantissa and its exponent counted from 7 instead of 127; of a smaller one,
    2^14 + |x| has steps of 2^-9, which are the format's.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _put_fp8(
    x_BD: tl.tensor, first: tl.tensor, count: tl.tensor, places: tl.tensor, bytes_: tl.tensor, halves: tl.tensor
) -> None:
    """Codes and scales of one side."""
    B: tl.constexpr = x_BD.shape[0]
    D: tl.constexpr = x_BD.shape[1]
    scale_B = _up_to_bf16(tl.math.div_rn(tl.max(tl.abs(x_BD), axis=1), _LARGEST_FP8))
    code_BD = _to_e4m3(_steps(x_BD, scale_B[:, None]))
    slot_B, here_B = first + tl.arange(0, B), tl.arange(0, B) < count
    at_BD = tl.multiple_of(tl.load(places), 16) + slot_B[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(bytes_ + at_BD, code_BD.to(tl.uint8), mask=here_B[:, None])
    tl.store(halves + tl.load(places + 1) // 2 + slot_B, scale_B.to(tl.bfloat16), mask=here_B)


@triton.jit
def _pack_integers(
    x_BD: tl.tensor, first: tl.tensor, count: tl.tensor, places: tl.tensor, bytes_: tl.tensor, halves: tl.tensor,
    SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise and pack int8, int4 or int2: codes, scales and zeros of one side. A grid runs along the slots of one
    channel, or along channels of a slot."""
    B: tl.constexpr = x_BD.shape[0]
    D: tl.constexpr = x_BD.shape[1]
    SPAN: tl.constexpr = SIDE.span
    PARTS: tl.constexpr = 8 // SIDE.bits
    W: tl.constexpr = D // PARTS
    TOP: tl.constexpr = (1 << SIDE.bits) - 1.0
    R: tl.constexpr = B // SPAN
    G: tl.constexpr = D // SIDE.channels
    AXIS: tl.constexpr = 1 if SPAN > 1 else 2
    x = tl.reshape(x_BD, [R, SPAN, G]) if SPAN > 1 else tl.reshape(x_BD, [R, G, SIDE.channels])
    low_RG, high_RG = tl.min(x, axis=AXIS), tl.max(x, axis=AXIS)
    cut_RG = (high_RG - low_RG) * ((1.0 - SIDE.clip) / 2)
    step_RG, start_RG = tl.math.div_rn(high_RG - low_RG - 2 * cut_RG, TOP), low_RG + cut_RG
    zero_RG = -_up_to_bf16(-start_RG)
    scale_RG = _up_to_bf16(tl.math.div_rn(start_RG + step_RG * TOP - zero_RG, TOP))
    code = tl.floor(_steps(x - tl.expand_dims(zero_RG, AXIS), tl.expand_dims(scale_RG, AXIS)) + _HALF)
    code_BD = tl.reshape(tl.minimum(tl.maximum(code, 0.0), TOP).to(tl.int32), [B, D])
    if PARTS > 1:  # channels b, b + W, .. share byte b, from its low bits up
        part = tl.arange(0, PARTS)[None, :, None]
        code_BD = tl.sum(tl.reshape(code_BD, [B, PARTS, W]) << (part * SIDE.bits), axis=1)
    at_BW = (first + tl.arange(0, B))[:, None] * W + tl.arange(0, W)[None, :]
    codes = bytes_ + tl.multiple_of(tl.load(places), min(W, 16))
    tl.store(codes + at_BW, code_BD.to(tl.uint8), mask=(tl.arange(0, B) < count)[:, None])
    at_RG = (first // SPAN + tl.arange(0, R))[:, None] * G + tl.arange(0, G)[None, :]
    here_R1 = (tl.arange(0, R) * SPAN < count)[:, None]
    tl.store(halves + tl.load(places + 1) // 2 + at_RG, scale_RG.to(tl.bfloat16), mask=here_R1)
    tl.store(halves + tl.load(places + 2) // 2 + at_RG, zero_RG.to(tl.bfloat16), mask=here_R1)


@triton.jit
def _put_side(
    x_BD: tl.tensor, first: tl.tensor, count: tl.tensor, places: tl.tensor, bytes_: tl.tensor, halves: tl.tensor,
    floats: tl.tensor,
    SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """`places` points at the addresses of codes, scales and zeros."""
    if SIDE.form == "float":
        WIDTH: tl.constexpr = floats.dtype.element_ty.primitive_bitwidth // 8
        ALIGNED: tl.constexpr = 16 // WIDTH  # fields begin at multiples of 16 bytes, extents at whole slots
        B: tl.constexpr = x_BD.shape[0]
        D: tl.constexpr = x_BD.shape[1]
        at = tl.multiple_of(tl.load(places) // WIDTH, ALIGNED)
        at_BD = at + (first + tl.arange(0, B))[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(floats + at_BD, x_BD, mask=(tl.arange(0, B) < count)[:, None])
    elif SIDE.form == "fp8":
        _put_fp8(x_BD, first, count, places, bytes_, halves)
    else:
        _pack_integers(x_BD, first, count, places, bytes_, halves, SIDE)


@triton.jit
def _rotated(x_BD: tl.tensor, signs: tl.tensor, factor: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """Hadamard(x), the smallest parts of x first."""
    D: tl.constexpr = x_BD.shape[1]
    signs_DD = tl.load(signs + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :])
    high_BD = x_BD.to(tl.bfloat16)
    rest_BD = x_BD - high_BD.to(tl.float32)
    middle_BD = rest_BD.to(tl.bfloat16)
    low_BD = (rest_BD - middle_BD.to(tl.float32)).to(tl.bfloat16)
    if PLAIN:  # the interpreter takes bf16 for integers
        ones_DD = signs_DD.to(tl.float32)
        y_BD = tl.dot(low_BD.to(tl.float32), ones_DD, input_precision="ieee")
        y_BD = tl.dot(middle_BD.to(tl.float32), ones_DD, y_BD, input_precision="ieee")
        y_BD = tl.dot(high_BD.to(tl.float32), ones_DD, y_BD, input_precision="ieee")
    else:
        y_BD = tl.dot(high_BD, signs_DD, tl.dot(middle_BD, signs_DD, tl.dot(low_BD, signs_DD)))
    return y_BD * factor


@triton.jit
def put_slots(
    k_BD: tl.tensor, v_BD: tl.tensor, first: tl.tensor, count: tl.tensor, places: tl.tensor,
    mean: tl.tensor, signs: tl.tensor, factor: tl.tensor,
    bytes_: tl.tensor, halves: tl.tensor, floats: tl.tensor,
    K: tl.constexpr, V: tl.constexpr, PLAIN: tl.constexpr,
) -> None:  # fmt: skip
    """The first `count` keys and values, in whole spans, as slots `first` and up of an extent; `places` points at the
    three addresses of its keys and behind them those of its values, `mean` at the mean key where keys are centred.
    `floats` is the arena in the cache's dtype."""
    if K.form == "int" or K.form == "fp8":
        k_BD = _finite(k_BD.to(tl.float32))
    if K.form == "fp8" or (K.form == "int" and K.span == 1):
        k_BD = _rotated(k_BD - tl.load(mean + tl.arange(0, k_BD.shape[1]))[None, :], signs, factor, PLAIN)
    _put_side(k_BD, first, count, places, bytes_, halves, floats, K)
    if V.form == "int" or V.form == "fp8":
        v_BD = _finite(v_BD.to(tl.float32))
    _put_side(v_BD, first, count, places + 3, bytes_, halves, floats, V)
