"""Matrix products of few rows on a CPU with AVX-512.

MKL copies the weights to another layout in every call, which pays for hundreds of rows: for 16 it takes three times as
long as reading them. Here weights are read where they are, once, and x is what is laid out anew, in panels of 16 rows
(pages/kernels/avx512.py).

    N rows of x, a multiple of 16   K input dims   O output dims
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvfold.attend.cpu_kernels import Floats
from kvfold.pages.kernels.avx512 import (
    LANES,
    MOST_PANELS,
    OUTPUTS,
    Tile,
    at,
    emitted,
    everywhere,
    index,
    pack_square,
    pointer,
    store_columns,
)
from kvfold.pages.kernels.cpu_jit import compiled


def _emit(num_panels: int, builder: Any, x: Any, w: Any, y: Any, size: Any, stride: Any) -> None:
    """y[16 rows, 8 outputs] of each panel, for weights [8, size]; rows of y are `stride` apart."""
    x, w, y = (pointer(builder, address) for address in (x, w, y))
    panels = [at(builder, x, builder.mul(index(LANES * i), size)) for i in range(num_panels)]
    weights, ahead = ([at(builder, w, index(first + i), size) for i in range(OUTPUTS)] for first in (0, OUTPUTS))
    tile = Tile(builder, panels, weights, index(1), ahead)
    sums = tile.run(size, [everywhere(0.0)] * (OUTPUTS * num_panels))
    for panel in range(num_panels):
        places = [at(builder, y, index(LANES * panel + i), stride) for i in range(LANES)]
        store_columns(builder, sums[panel::num_panels], places)


_one, _two, _three = (emitted(partial(_emit, number)) for number in range(1, MOST_PANELS + 1))


@compiled
def pack_rows(x: int, num_rows: int, size: int, out_X: Floats, row_16: Any) -> None:
    """Rows at an address as panels."""
    out = out_X.ctypes.data
    for n in range(0, num_rows, LANES):
        for i in range(LANES):
            row_16[i] = x + 4 * (n + i) * size
        for k in range(0, size, LANES):
            column = min(k, size - LANES)
            pack_square((row_16.ctypes.data, column, out + 4 * n * size))


@compiled
def products(x_X: Floats, w_OK: Floats, y_NO: Floats, begin: int, end: int) -> None:
    """y = x @ w.T of packed x and blocks begin:end of 8 outputs; the last may overlap the one before it."""
    num_outputs, size = w_OK.shape
    num_panels = len(y_NO) // LANES
    for block in range(begin, end):
        o = min(OUTPUTS * block, num_outputs - OUTPUTS)
        first = 0
        while first < num_panels:
            x, w = x_X.ctypes.data + 4 * first * LANES * size, w_OK.ctypes.data + 4 * o * size
            y, left = y_NO.ctypes.data + 4 * (first * LANES * num_outputs + o), num_panels - first
            if left == 1:
                _one((x, w, y, size, num_outputs))
                first += 1
            elif left == 2 or left == 4:
                _two((x, w, y, size, num_outputs))
                first += 2
            else:
                _three((x, w, y, size, num_outputs))
                first += 3


def packed(x_NK: Floats) -> Floats:
    """Rows, a multiple of 16, as panels: [N / 16, K, 16], flat."""
    out: Floats = np.empty(x_NK.size, dtype=np.float32)
    pack_rows(x_NK.ctypes.data, *x_NK.shape, out, np.empty(LANES, dtype=np.int64))
    return out
