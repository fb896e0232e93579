"""What a decoder layer computes on a CPU, compiled by numba: matrix products, RMS norms, rotary embedding,
SwiGLU. An operation of PyTorch takes longer to call than to compute here.

Kernels of bf16 rows round what they give, and compute in fp32 as those of fp32 rows do, a row at a time.

    N rows   K input dims   O output dims   M hidden dims   D head dim
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvfold.attend.cpu_kernels import Floats, exponentials, jit

Halves = NDArray[np.uint16]  # the bits of bf16 numbers

_LINE = 16  # fp32 numbers that a cache line holds
_PIECE = 256  # numbers whose exponentials are computed at once


@intrinsic
def _prefetch(_context: Any, array: Any, _index: Any) -> Any:
    """Ask for the cache line of an element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(view.data, [arguments[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, number(0), number(3), number(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@jit
def products(x_NK: Floats, w_OK: Floats, y_NO: Floats, begin: int, end: int) -> None:
    """y = x @ w.T in blocks of 4 rows of each, of w the blocks begin:end; the last may overlap the one before it, and N
    is a multiple of 4. The 16 sums of a block stay in registers; the next block comes from memory meanwhile."""
    num_rows, size = x_NK.shape
    flat_w, share = w_OK.reshape(-1), -(-16 * size // num_rows)
    for block in range(begin, end):
        o = min(4 * block, len(w_OK) - 4)
        w0, w1, w2, w3 = w_OK[o], w_OK[o + 1], w_OK[o + 2], w_OK[o + 3]
        ahead = (o + 4) * size
        for n in range(0, num_rows, 4):
            for i in range(ahead, min(ahead + share, len(flat_w)), _LINE):
                _prefetch(flat_w, i)
            ahead += share
            x0, x1, x2, x3 = x_NK[n], x_NK[n + 1], x_NK[n + 2], x_NK[n + 3]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = np.float32(0)
            s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = np.float32(0)
            for i in range(size):
                a, b, c, d = w0[i], w1[i], w2[i], w3[i]
                x = x0[i]
                s00, s01, s02, s03 = s00 + x * a, s01 + x * b, s02 + x * c, s03 + x * d
                x = x1[i]
                s10, s11, s12, s13 = s10 + x * a, s11 + x * b, s12 + x * c, s13 + x * d
                x = x2[i]
                s20, s21, s22, s23 = s20 + x * a, s21 + x * b, s22 + x * c, s23 + x * d
                x = x3[i]
                s30, s31, s32, s33 = s30 + x * a, s31 + x * b, s32 + x * c, s33 + x * d
            y_NO[n, o], y_NO[n, o + 1], y_NO[n, o + 2], y_NO[n, o + 3] = s00, s01, s02, s03
            y_NO[n + 1, o], y_NO[n + 1, o + 1], y_NO[n + 1, o + 2], y_NO[n + 1, o + 3] = s10, s11, s12, s13
            y_NO[n + 2, o], y_NO[n + 2, o + 1], y_NO[n + 2, o + 2], y_NO[n + 2, o + 3] = s20, s21, s22, s23
            y_NO[n + 3, o], y_NO[n + 3, o + 1], y_NO[n + 3, o + 2], y_NO[n + 3, o + 3] = s30, s31, s32, s33


@jit
def rms_norm(x_NM: Floats, out_NM: Floats, weight_M: Floats, epsilon: float) -> None:
    for n in range(len(x_NM)):
        x, out, total = x_NM[n], out_NM[n], np.float32(0)
        for i in range(len(x)):
            total += x[i] * x[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + np.float32(epsilon))
        for i in range(len(x)):
            out[i] = weight_M[i] * (x[i] * factor)


@jit
def add_norm(x_NM: Floats, more_NM: Floats, sum_NM: Floats, out_NM: Floats, weight_M: Floats, epsilon: float) -> None:
    """The sum of x and more, and its norm."""
    for n in range(len(x_NM)):
        x, more, both = x_NM[n], more_NM[n], sum_NM[n]
        for i in range(len(x)):
            both[i] = x[i] + more[i]
    rms_norm(sum_NM, out_NM, weight_M, epsilon)


@jit
def add(x_NM: Floats, more_NM: Floats) -> None:
    """x += more"""
    for n in range(len(x_NM)):
        x, more = x_NM[n], more_NM[n]
        for i in range(len(x)):
            x[i] += more[i]


@jit
def rotate(x_NX: Floats, cos_ND: Floats, sin_ND: Floats) -> None:
    """Rotary embedding of all heads of a row, in place; of the first rows, for which there are angles."""
    head_dim = cos_ND.shape[1]
    half = head_dim // 2
    for n in range(len(cos_ND)):
        cos, sin = cos_ND[n], sin_ND[n]
        for first in range(0, x_NX.shape[1], head_dim):
            low, high = x_NX[n, first : first + half], x_NX[n, first + half : first + head_dim]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * cos[i] - b * sin[i]
                high[i] = b * cos[half + i] + a * sin[half + i]


@jit
def _gate(gate: Floats, up: Floats, small: Floats, power: Any) -> None:
    """silu(gate) * up in place of the gate; `small` and `power` are room for as many numbers."""
    for i in range(len(gate)):
        small[i] = -abs(gate[i])
    exponentials(small, len(gate), power)
    for i in range(len(gate)):
        share = np.float32(1) if gate[i] > 0 else small[i]
        gate[i] *= share / (np.float32(1) + small[i]) * up[i]


@jit
def swiglu(gate_NK: Floats, up_NK: Floats, begin: int, end: int) -> None:
    """silu(gate) * up of columns begin:end, in place of the gate."""
    small, power = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.int32)
    for n in range(len(gate_NK)):
        for first in range(begin, end, _PIECE):
            last = min(first + _PIECE, end)
            _gate(gate_NK[n, first:last], up_NK[n, first:last], small, power)


@jit
def widen(x_M: Halves, out_M: Floats) -> None:
    """bf16 numbers as fp32."""
    bits = out_M.view(np.uint32)
    for i in range(len(x_M)):
        bits[i] = np.uint32(x_M[i]) << np.uint32(16)


@jit
def narrow(x_M: Floats, out_M: Halves) -> None:
    """fp32 numbers as the nearest bf16 ones, ties to even."""
    bits, one, half = x_M.view(np.uint32), np.uint32(1), np.uint32(0x7FFF)
    for i in range(len(x_M)):
        found = (bits[i] + half + ((bits[i] >> np.uint32(16)) & one)) >> np.uint32(16)
        is_nan = (bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out_M[i] = np.uint16(np.uint32(0x7FC0) if is_nan else found)


@jit
def round_bf16(x_NX: Floats, begin: int, end: int) -> None:
    """Columns begin:end of rows become bf16 numbers."""
    halves = np.empty(end - begin, np.uint16)
    for n in range(len(x_NX)):
        narrow(x_NX[n, begin:end], halves)
        widen(halves, x_NX[n, begin:end])


@jit
def norm_bf16(x_NM: Halves, out_NM: Halves, weight_M: Floats, epsilon: float) -> None:
    """RMS norms of rows."""
    shape = 1, x_NM.shape[1]
    wide, found = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for n in range(len(x_NM)):
        widen(x_NM[n], wide[0])
        rms_norm(wide, found, weight_M, epsilon)
        narrow(found[0], out_NM[n])


@jit
def add_norm_bf16(
    x_NM: Halves, more_NM: Halves, sum_NM: Halves, out_NM: Halves, weight_M: Floats, epsilon: float
) -> None:
    """The sum of x and more, and its norm."""
    shape = 1, x_NM.shape[1]
    wide, more, found = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    for n in range(len(x_NM)):
        widen(x_NM[n], wide[0])
        widen(more_NM[n], more[0])
        add(wide, more)
        narrow(wide[0], sum_NM[n])
        rms_norm(wide, found, weight_M, epsilon)
        narrow(found[0], out_NM[n])


@jit
def rotate_bf16(x_NX: Halves, out_NX: Floats, cos_ND: Floats, sin_ND: Floats) -> None:
    """Rotary embedding, rounded to bf16 and given as fp32."""
    halves = np.empty(x_NX.shape[1], np.uint16)
    for n in range(len(x_NX)):
        widen(x_NX[n], out_NX[n])
        rotate(out_NX[n : n + 1], cos_ND[n : n + 1], sin_ND[n : n + 1])
        narrow(out_NX[n], halves)
        widen(halves, out_NX[n])
