"""Words of 16 bits to numbers inside a kernel, without integer-to-float conversions, which run at an eighth of the
usual rate, and without moving a bit between threads: a part of a word becomes a bf16 number in the word's place.

A bf16 number of 2^7 .. 2^8 has steps of 1, so the bits 0x4300 with a code in the low bits *are* 128 + code: a shift and
one logic operation convert two codes. The 128 stays in; readers take it out with the zero they add anyway (their
SHIFT). A code of 8 bits does not fit seven bits of mantissa: its top bit, moved into another number's exponent, makes
-256 or -128, and the sum of both is code - 128. An e4m3 float is a bf16 float whose exponent counts from another bias:
shifting its bits and multiplying by 2^120 is exact, subnormals included. (0x7f and 0xff, NaN in e4m3, are never
stored.)

Each has a plain twin (`PLAIN`) for machines without this instruction set; both give the same bits for all words.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _instructions(part: int, form: str, bits: int) -> str:
    """$1 holds two words, $0 gets two numbers. Truth tables: 0xea is (x & y) | z, 0x6a is (x & y) ^ z.

    A shift moves bits of one word into the other; the masks remove them.
    """
    if form == "fp8":  # from the upper byte: sign in place, the rest four bits lower; then times 2^120, plus -0
        body = (
            f"shl.b32 a, $1, {8 - 8 * part}; shr.u32 b, a, 4; and.b32 b, b, 0x07f007f0;"
            "lop3.b32 a, a, 0x80008000, b, 0xea;"
            "mov.b32 m, 0x7b807b80; mov.b32 n, 0x80008000; fma.rn.bf16x2 $0, a, m, n;"
        )
    elif bits == 8:  # (128 + low seven bits) * 1 + (-256 or -128)
        body = (
            f"shr.u32 a, $1, {8 * part}; mov.b32 m, 0x43004300; mov.b32 n, 0xc380c380;"
            "lop3.b32 b, a, 0x00800080, n, 0x6a; lop3.b32 a, a, 0x007f007f, m, 0xea;"
            "mov.b32 m, 0x3f803f80; fma.rn.bf16x2 $0, a, m, b;"
        )
    else:
        mask = "0x000f000f" if bits == 4 else "0x00030003"
        body = f"shr.u32 a, $1, {bits * part}; mov.b32 m, 0x43004300; lop3.b32 $0, a, {mask}, m, 0xea;"
    return "{ .reg .b32 a, b, m, n; " + body + " }"


@triton.jit
def unpack(
    word: tl.tensor, PART: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tensor:
    """The numbers at bits PART * BITS of each word, bf16; floats as they are."""
    if FORM == "float":
        x = word
    elif PLAIN:
        x = _plain(word, PART, FORM, BITS)
    else:
        x = tl.inline_asm_elementwise(
            _instructions(PART, FORM, BITS), "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x


@triton.jit
def _plain(word: tl.tensor, PART: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    code = (word.to(tl.int32) >> (PART * BITS)) & ((1 << BITS) - 1)
    if FORM == "fp8":
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        x = code.to(tl.float32) + (128.0 if BITS < 8 else -128.0)
    return x.to(tl.bfloat16)
