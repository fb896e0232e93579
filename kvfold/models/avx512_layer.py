"""A decoder layer for few rows on a CPU with AVX-512: each matrix product in one call with what comes before and after.

Every thread computes the norm and lays out the rows itself, which takes microseconds; then threads take the outputs
part by part.

    N rows, a multiple of 16   M hidden dims   K dims of the MLP   O output dims
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvfold.attend.cpu_kernels import Floats
from kvfold.models.avx512_gemm import pack_rows, products
from kvfold.models.cpu_kernels import add_norm, rms_norm, swiglu
from kvfold.pages.kernels.avx512 import LANES, OUTPUTS
from kvfold.pages.kernels.cpu_jit import compiled, take

_PART = 8  # blocks of outputs


@compiled
def _packed(x_NK: Any) -> Any:
    found = np.empty(x_NK.size, np.float32)
    pack_rows(x_NK.ctypes.data, *x_NK.shape, found, np.empty(LANES, np.int64))
    return found


@compiled
def _num_parts(w_OK: Any) -> int:
    return -(-len(w_OK) // (OUTPUTS * _PART))


@compiled
def _multiply(x_X: Floats, w_OK: Floats, y_NO: Floats, part: int) -> tuple[int, int]:
    """A part of the outputs, which is returned."""
    begin, end = _PART * part, min(_PART * (part + 1), -(-len(w_OK) // OUTPUTS))
    products(x_X, w_OK, y_NO, begin, end)
    return OUTPUTS * begin, OUTPUTS * end


@compiled
def normed(x_NM: Floats, norm: Any, weights: Any, outs: Any, counter: Any) -> None:
    """Products of the norm of x."""
    y_NM = np.empty_like(x_NM)
    rms_norm(x_NM, y_NM, norm[0], norm[1])
    y_X, first, part = _packed(y_NM), 0, take(counter)
    for i in range(len(weights)):
        count = _num_parts(weights[i])
        while part < first + count:
            _multiply(y_X, weights[i], outs[i], part - first)
            part = take(counter)
        first += count


@compiled
def plain(x_NK: Floats, w_OK: Floats, y_NO: Floats, counter: Any) -> None:
    x_X, part = _packed(x_NK), take(counter)
    while part < _num_parts(w_OK):
        _multiply(x_X, w_OK, y_NO, part)
        part = take(counter)


@compiled
def gated(x_NM: Floats, more_NM: Floats, norm: Any, weights: Any, outs: Any, sum_NM: Floats, counter: Any) -> None:
    """The sum of x and more, and SwiGLU of its norm in place of the gate. Outputs are whole blocks."""
    both_NM, y_NM = np.empty_like(x_NM), np.empty_like(x_NM)
    add_norm(x_NM, more_NM, both_NM, y_NM, norm[0], norm[1])
    y_X, part = _packed(y_NM), take(counter)
    if part == 0:
        sum_NM[:] = both_NM
    while part < _num_parts(weights[0]):
        begin, end = _multiply(y_X, weights[0], outs[0], part)
        _multiply(y_X, weights[1], outs[1], part)
        swiglu(outs[0], outs[1], begin, end)
        part = take(counter)


@compiled
def added(x_NK: Floats, w_OK: Floats, more_NO: Floats, y_NO: Floats, counter: Any) -> None:
    """A product and `more`. Outputs are whole blocks."""
    x_X, part = _packed(x_NK), take(counter)
    while part < _num_parts(w_OK):
        begin, end = _multiply(x_X, w_OK, y_NO, part)
        for n in range(len(y_NO)):
            y, more = y_NO[n], more_NO[n]
            for i in range(begin, end):
                y[i] += more[i]
        part = take(counter)
