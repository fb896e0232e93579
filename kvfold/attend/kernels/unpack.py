"""Bytes to numbers inside a kernel, without integer-to-float conversions, which run at an eighth of the usual rate.

A bf16 number of 2^7 .. 2^8 has steps of 1, so the bits 0x4300 with a code in the low bits *are* 128 + code: one logic
operation converts two codes. The 128 stays in; readers take it out with the zero they add anyway (their SHIFT). A code
of 8 bits does not fit seven bits of mantissa: its top bit, moved into another number's exponent, makes -256 or -128,
and the sum of both is code - 128. An e4m3 float is a bf16 float whose exponent counts from another bias: shifting its
bits and multiplying by 2^120 is exact, subnormals included. (0x7f and 0xff, NaN in e4m3, are never stored.)

Each has a plain twin (`PLAIN`) for machines without this instruction set; both give the same bits for all 256 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The four bytes of a register spread over two registers of 16-bit halves: a = [b0, b1], b = [b2, b3], then per shift
# (x & mask) | 0x4300 in both halves; 0xea is the truth table of (x & y) | z.
_SPREAD = "prmt.b32 a, $S, 0, 0x4140; prmt.b32 b, $S, 0, 0x4342;"


def _lift(first: int, mask: str) -> str:
    """Write 128 + code of both registers."""
    return f"lop3.b32 ${first}, a, {mask}, m, 0xea; lop3.b32 ${first + 1}, b, {mask}, m, 0xea;"


def _shift(bits: int) -> str:
    return f"shr.u32 a, a, {bits}; shr.u32 b, b, {bits};"


def _program(body: str, source: int) -> str:
    return "{ .reg .b32 a, b, m, n; mov.b32 m, 0x43004300; " + body.replace("$S", f"${source}") + " }"


_INT2 = tl.constexpr(_program(_SPREAD + _shift(2).join(_lift(2 * part, "0x00030003") for part in range(4)), 8))
_INT4 = tl.constexpr(_program(_SPREAD + _shift(4).join(_lift(2 * part, "0x000f000f") for part in range(2)), 4))
# (128 + low seven bits) * 1 + (-256 or -128); 0x6a is the truth table of (x & y) ^ z.
_INT8 = tl.constexpr(
    _program(
        ".reg .b32 c, d, one; mov.b32 one, 0x3f803f80; mov.b32 n, 0xc380c380;"
        + _SPREAD
        + "lop3.b32 c, a, 0x00800080, n, 0x6a; lop3.b32 d, b, 0x00800080, n, 0x6a;"
        "lop3.b32 a, a, 0x007f007f, m, 0xea; lop3.b32 b, b, 0x007f007f, m, 0xea;"
        "fma.rn.bf16x2 $0, a, one, c; fma.rn.bf16x2 $1, b, one, d;",
        2,
    )
)
# Bytes in the upper half: sign in place, exponent and mantissa four bits lower; then times 2^120, plus -0.
_FP8 = tl.constexpr(
    _program(
        ".reg .b32 c, d; prmt.b32 a, $S, 0, 0x1404; prmt.b32 b, $S, 0, 0x3424;"
        "shr.u32 c, a, 4; shr.u32 d, b, 4; and.b32 c, c, 0x07f007f0; and.b32 d, d, 0x07f007f0;"
        "lop3.b32 a, a, 0x80008000, c, 0xea; lop3.b32 b, b, 0x80008000, d, 0xea;"
        "mov.b32 m, 0x7b807b80; mov.b32 n, 0x80008000;"
        "fma.rn.bf16x2 $0, a, m, n; fma.rn.bf16x2 $1, b, m, n;",
        2,
    )
)


@triton.jit
def unpack(code: tl.tensor, FORM: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr) -> tl.tuple:
    """Four parts of a slot's channels, of which those that the code holds count: 8 / BITS, or the first alone."""
    if FORM == "float":
        parts = code, code, code, code
    elif FORM == "fp8":
        x = _fp8(code, PLAIN)
        parts = x, x, x, x
    elif BITS == 8:
        x = _int8(code, PLAIN)
        parts = x, x, x, x
    elif BITS == 4:
        low, high = _int4(code, PLAIN)
        parts = low, high, low, high
    else:
        parts = _int2(code, PLAIN)
    return parts


@triton.jit
def _fp8(code: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    if PLAIN:
        wide = code.to(tl.uint32)
        bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        x = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)
    else:
        x = tl.inline_asm_elementwise(_FP8, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return x


@triton.jit
def _int8(code: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    if PLAIN:
        x = (code.to(tl.float32) - 128.0).to(tl.bfloat16)
    else:
        x = tl.inline_asm_elementwise(_INT8, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return x


@triton.jit
def _int4(code: tl.tensor, PLAIN: tl.constexpr) -> tl.tuple:
    if PLAIN:
        low, high = _lifted(code, 0, 15), _lifted(code, 4, 15)
    else:
        low, high = tl.inline_asm_elementwise(
            _INT4, "=r,=r,=r,=r,r", [code], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _int2(code: tl.tensor, PLAIN: tl.constexpr) -> tl.tuple:
    if PLAIN:
        a, b, c, d = _lifted(code, 0, 3), _lifted(code, 2, 3), _lifted(code, 4, 3), _lifted(code, 6, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT2,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [code],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return a, b, c, d


@triton.jit
def _lifted(code: tl.tensor, FROM: tl.constexpr, MASK: tl.constexpr) -> tl.tensor:
    return (((code >> FROM) & MASK).to(tl.float32) + 128.0).to(tl.bfloat16)
