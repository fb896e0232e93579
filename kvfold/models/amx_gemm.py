"""Matrix products of few rows of bf16 weights on a CPU with AMX.

oneDNN copies the weights to pairs of rows in every call. Here the weights are read where they are, as the first factor
of a tile's products, and x is what is laid out anew, in pair panels of 16 rows (pages/kernels/amx.py). Sums are fp32;
x is rounded to bf16 when it is packed.

    N rows of x, a multiple of 16   K input dims, a multiple of 32   O output dims
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.attend.cpu_kernels import Floats
from kvfold.pages.kernels import amx
from kvfold.pages.kernels.avx512 import (
    LANES,
    at,
    emitted,
    index,
    load,
    loop,
    pointer,
    store,
    transposed,
)
from kvfold.pages.kernels.cpu_jit import compiled, floats_on_line

OUTPUTS = 2 * LANES  # two tiles of weights: with two panels, sums and factors fill all eight
_MOST_PANELS = 2
_TILE = LANES * LANES  # sums
_ROOM = 2 * _MOST_PANELS * _TILE

Halves = NDArray[np.uint16]


def _emit_products(num_panels: int, builder: Any, x: Any, w: Any, y: Any, size: Any, stride: Any, room: Any) -> None:
    """y[16 rows, 32 outputs] of each panel, for weights [32, size]; rows of y are `stride` numbers apart. `room`: for
    the sums of all tiles."""
    x, w, y, room = (pointer(builder, address) for address in (x, w, y, room))
    half = builder.lshr(size, index(1))  # fp32 numbers as long as a row of weights
    row_bytes, between = builder.shl(size, index(1)), index(amx.ROW_BYTES)
    panels = [at(builder, x, index(LANES * i), half) for i in range(num_panels)]
    tiles = [at(builder, w, index(LANES * i), half) for i in range(2)]
    for tile in range(2 * num_panels):
        amx.zero(builder, tile)

    def add(k: Any, _: Any) -> list[Any]:
        """32 of K, of which k are the pairs."""
        for i, place in enumerate(tiles):
            amx.load_tile(builder, 4 + i, at(builder, place, k), row_bytes)
        for panel, place in enumerate(panels):
            amx.load_tile(builder, 6 + panel, at(builder, place, k, index(LANES)), between)
            for i in range(2):
                amx.multiply(builder, 2 * panel + i, 4 + i, 6 + panel)
        return []

    loop(builder, index(0), half, amx.PAIRS, [], add)
    for tile in range(2 * num_panels):
        panel, i = divmod(tile, 2)
        sums = at(builder, room, index(_TILE * tile))
        amx.store_tile(builder, tile, sums, between)
        columns = [load(builder, at(builder, sums, index(LANES * output))) for output in range(LANES)]
        for n, row in enumerate(transposed(builder, columns)):
            store(builder, row, at(builder, at(builder, y, index(LANES * panel + n), stride), index(LANES * i)))


def _emit_pack(builder: Any, rows: Any, column: Any, panel: Any) -> None:
    """32 columns of 16 rows of fp32 numbers, from a column on, to a pair panel; `rows`: where their addresses are."""
    addresses = builder.inttoptr(rows, index(0).type.as_pointer())
    places = [pointer(builder, builder.load(builder.gep(addresses, [index(i)]))) for i in range(LANES)]
    starts = [at(builder, place, column) for place in places]
    pairs = [
        amx.pairs_of(builder, load(builder, start), load(builder, at(builder, start, index(LANES)))) for start in starts
    ]
    target = at(builder, pointer(builder, panel), builder.lshr(column, index(1)), index(LANES))
    for i, values in enumerate(transposed(builder, pairs)):
        store(builder, values, at(builder, target, index(LANES * i)))


_one, _two = (emitted(partial(_emit_products, number)) for number in range(1, _MOST_PANELS + 1))
pack_pairs = emitted(_emit_pack)


@compiled
def pack_rows(x: int, num_rows: int, size: int, out_X: Floats, row_16: Any) -> None:
    """fp32 rows at an address as pair panels."""
    out = out_X.ctypes.data
    for n in range(0, num_rows, LANES):
        for i in range(LANES):
            row_16[i] = x + 4 * (n + i) * size
        for k in range(0, size, amx.DEPTH):
            pack_pairs((row_16.ctypes.data, k, out + 2 * n * size))


@compiled
def products(x_X: Floats, w_OK: Halves, y_NO: Floats, begin: int, end: int) -> None:
    """y = x @ w.T of packed x and blocks begin:end of 32 outputs; the last may overlap the one before it."""
    num_outputs, size = w_OK.shape
    num_panels = len(y_NO) // LANES
    room = floats_on_line(_ROOM)
    amx.configure(())
    for block in range(begin, end):
        o = min(OUTPUTS * block, num_outputs - OUTPUTS)
        first = 0
        while first < num_panels:
            x, w = x_X.ctypes.data + 2 * first * LANES * size, w_OK.ctypes.data + 2 * o * size
            y = y_NO.ctypes.data + 4 * (first * LANES * num_outputs + o)
            if first == num_panels - 1:
                _one((x, w, y, size, num_outputs, room.ctypes.data))
            else:
                _two((x, w, y, size, num_outputs, room.ctypes.data))
            first += 2
    amx.release(())


def packed(x_NK: Floats) -> Floats:
    """Rows, a multiple of 16, as pair panels: [N / 16, K / 2, 16] pairs, flat."""
    out: Floats = floats_on_line(x_NK.size // 2)
    pack_rows(x_NK.ctypes.data, *x_NK.shape, out, np.empty(LANES, dtype=np.int64))
    return out
