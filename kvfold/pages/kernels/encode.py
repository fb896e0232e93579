"""Slots as pages hold them, on a GPU: floats as they are, integers by the arithmetic of codec/integer.py, step by step.

Rotations are products with the signs of the Hadamard matrix instead of butterflies, so a code may differ by one where a
number lies within fp32 rounding of the border between two. Signs are exact in bf16, and three bf16 numbers hold an fp32
one, so nothing is lost on tensor cores, and a processor has room for several programs.

    B slots   D head dim (a power of two)   W bytes of a code
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.codec import grid
from kvfold.codec.base import Codec
from kvfold.codec.integer import IntegerCodec

_HALF = tl.constexpr(grid.HALF)
_LARGEST = tl.constexpr(grid.LARGEST)


def width(codec: Codec) -> tuple[int, float]:
    """Bits of a code, 0 for floats, and how much of its span the grid covers."""
    return (codec.bits, codec.clip) if isinstance(codec, IntegerCodec) else (0, 1.0)


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
def _put_integers(
    x_BD: tl.tensor,
    here_B: tl.tensor,
    slot_B: tl.tensor,
    places: tl.tensor,
    bytes_: tl.tensor,
    halves: tl.tensor,
    B: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    CLIP: tl.constexpr,
) -> None:
    """Codes, scales and zeros of one side; `places` points at their three addresses."""
    PARTS: tl.constexpr = 8 // BITS
    W: tl.constexpr = D // PARTS
    TOP: tl.constexpr = (1 << BITS) - 1
    low_B, high_B = tl.min(x_BD, axis=1), tl.max(x_BD, axis=1)
    cut_B = (high_B - low_B) * ((1.0 - CLIP) / 2)
    step_B, start_B = (high_B - low_B - 2 * cut_B) / TOP, low_B + cut_B
    zero_B = -_up_to_bf16(-start_B)
    scale_B = _up_to_bf16((start_B + step_B * TOP - zero_B) / TOP)
    divisor_B = tl.where(scale_B > 0, scale_B, 1.0)
    code_BD = tl.floor((x_BD - zero_B[:, None]) / divisor_B[:, None] + _HALF)
    code_BD = tl.minimum(tl.maximum(code_BD, 0.0), TOP).to(tl.int32)
    if PARTS > 1:  # channels b, b + W, .. share byte b, from its low bits up
        part = tl.arange(0, PARTS)[None, :, None]
        code_BD = tl.sum(tl.reshape(code_BD, [B, PARTS, W]) << (part * BITS), axis=1)
    at_BW = tl.multiple_of(tl.load(places), min(W, 16)) + slot_B[:, None] * W + tl.arange(0, W)[None, :]
    tl.store(bytes_ + at_BW, code_BD.to(tl.uint8), mask=here_B[:, None])
    tl.store(halves + tl.load(places + 1) // 2 + slot_B, scale_B.to(tl.bfloat16), mask=here_B)
    tl.store(halves + tl.load(places + 2) // 2 + slot_B, zero_B.to(tl.bfloat16), mask=here_B)


@triton.jit
def _rotated(x_BD: tl.tensor, signs: tl.tensor, factor: tl.tensor, D: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Hadamard(x), the smallest parts of x first."""
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
    k_BD: tl.tensor,
    v_BD: tl.tensor,
    here_B: tl.tensor,
    slot_B: tl.tensor,
    places: tl.tensor,
    mean: tl.tensor,
    signs: tl.tensor,
    factor: tl.tensor,
    bytes_: tl.tensor,
    halves: tl.tensor,
    floats: tl.tensor,
    B: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_CLIP: tl.constexpr,
    V_CLIP: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Keys and values that are `here_B`, as slots `slot_B` of an extent; `places` points at the three addresses of its
    keys and behind them those of its values, `mean` at the mean key of integers. `floats` is the arena in the cache's
    dtype of WIDTH bytes; bits 0: stored as it is."""
    place_BD = slot_B[:, None] * D + tl.arange(0, D)[None, :]
    ALIGNED: tl.constexpr = min(D, 16 // WIDTH)  # fields begin at multiples of 16 bytes, extents at whole slots
    if K_BITS:
        x_BD = _finite(k_BD.to(tl.float32)) - tl.load(mean + tl.arange(0, D))[None, :]
        x_BD = _rotated(x_BD, signs, factor, D, PLAIN)
        _put_integers(x_BD, here_B, slot_B, places, bytes_, halves, B, D, K_BITS, K_CLIP)
    else:
        at = tl.multiple_of(tl.load(places) // WIDTH, ALIGNED)
        tl.store(floats + at + place_BD, k_BD, mask=here_B[:, None])
    if V_BITS:
        y_BD = _finite(v_BD.to(tl.float32))
        _put_integers(y_BD, here_B, slot_B, places + 3, bytes_, halves, B, D, V_BITS, V_CLIP)
    else:
        at = tl.multiple_of(tl.load(places + 3) // WIDTH, ALIGNED)
        tl.store(floats + at + place_BD, v_BD, mask=here_B[:, None])
