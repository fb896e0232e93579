"""LLVM IR of AMX tiles for numba: 16 x 16 sums of products of bf16 numbers, 32 products for each in one instruction.

    sums[i, n] += a[i, 2k] * b[k, 2n] + a[i, 2k + 1] * b[k, 2n + 1]        i, n, k = 0 … 15

`a` is 16 rows of 32 numbers, as a matrix holds them: weights, keys. `b` is a *pair panel*: of 16 rows the numbers 2k
and 2k + 1 stand side by side, row after row, so that a column of pairs is one register of 16 lanes. Sums of a column
are the lanes of a register, too, as in panels of fp32 (avx512.py). Each sum runs over k in order in the numbers of one
instruction after the other, whatever the other columns hold.

A thread has 8 tiles. Between `configure` and `release` nothing else of the thread may use them: oneDNN configures its
own whenever they are released.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvfold.pages.kernels.avx512 import LANES, emitted

PAIRS = 16  # of a tile's row
DEPTH = 2 * PAIRS  # numbers that one instruction multiplies for each sum
ROW_BYTES = 64  # of a tile
TILE_BYTES = LANES * ROW_BYTES
_NUM_TILES = 8

_BYTE, _INDEX = ir.IntType(8), ir.IntType(64)


def _call(builder: Any, name: str, kinds: list[Any], arguments: list[Any]) -> None:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}")
    builder.call(function, arguments)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _bytes_at(builder: Any, place: Any) -> Any:
    return builder.bitcast(place, cgutils.voidptr_t)


def _emit_configure(builder: Any) -> None:
    """All tiles have 16 rows of 64 bytes: palette 1, bytes of a row as 16-bit numbers from 16 on, rows from 48 on."""
    layout = bytearray(64)
    layout[0] = 1
    for tile in range(_NUM_TILES):
        layout[16 + 2 * tile], layout[48 + tile] = ROW_BYTES, LANES
    constant = cgutils.global_constant(builder.module, "kvfold_tiles", cgutils.make_bytearray(layout))
    _call(builder, "ldtilecfg", [cgutils.voidptr_t], [_bytes_at(builder, constant)])


def _emit_release(builder: Any) -> None:
    _call(builder, "tilerelease", [], [])


def zero(builder: Any, tile: int) -> None:
    _call(builder, "tilezero", [_BYTE], [_tile(tile)])


def load_tile(builder: Any, tile: int, place: Any, stride: Any) -> None:
    """Rows are `stride` bytes apart."""
    kinds, arguments = [_BYTE, cgutils.voidptr_t, _INDEX], [_tile(tile), _bytes_at(builder, place), stride]
    _call(builder, "tileloadd64", kinds, arguments)


def store_tile(builder: Any, tile: int, place: Any, stride: Any) -> None:
    kinds, arguments = [_BYTE, cgutils.voidptr_t, _INDEX], [_tile(tile), _bytes_at(builder, place), stride]
    _call(builder, "tilestored64", kinds, arguments)


def multiply(builder: Any, sums: int, a: int, b: int) -> None:
    _call(builder, "tdpbf16ps", [_BYTE] * 3, [_tile(number) for number in (sums, a, b)])


_HALVES = ir.VectorType(ir.IntType(16), DEPTH)
_SIDE_BY_SIDE = ir.Constant(ir.VectorType(ir.IntType(32), DEPTH), [i // 2 + LANES * (i % 2) for i in range(DEPTH)])


def narrowed(builder: Any, low: Any, high: Any) -> Any:
    """The nearest bf16 numbers, ties to even; those too small for a normal number become 0, as tiles take them."""
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.FunctionType(_HALVES, [low.type] * 2)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [high, low])


def paired(builder: Any, low: Any, high: Any) -> Any:
    """Registers of fp32 numbers as one of pairs of bf16 numbers, lane by lane, as fp32 lanes."""
    found = narrowed(builder, low, high)
    return builder.bitcast(builder.shuffle_vector(found, ir.Constant(_HALVES, ir.Undefined), _SIDE_BY_SIDE), low.type)


def pairs_of(builder: Any, low: Any, high: Any) -> Any:
    """32 fp32 numbers, which stand one behind the other in two registers, as 16 pairs of bf16 numbers."""
    return builder.bitcast(narrowed(builder, low, high), low.type)


configure, release = emitted(_emit_configure), emitted(_emit_release)
