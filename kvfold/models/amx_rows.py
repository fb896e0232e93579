"""Decoder layers of bf16 models for many rows, on a CPU with AMX: matrix products and all that stands between them.

Rows are the first factor of a tile's products, as they are, and weights the second, laid out in each call as pair
panels (pages/kernels/amx.py): that pays where rows are many. Sums of 32 outputs stay in a core's cache until they are
biased, gated or added, and become bf16. Everything is rounded where kernels of few rows round (avx512_layer.py), and
sums run over inputs in the same order.

Threads go through phases (pages/kernels/cpu_jit.py), whose parts are rows, or outputs of a block of rows.

    N rows   M hidden dims   K dims of the MLP   X outputs of a product   D head dim   C columns of a layer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from kvfold.models.avx512_layer import AFTER, BEFORE, DOWN, GATE, K_BIAS, OUT, Q_BIAS, UP, V_BIAS, K, Q, V
from kvfold.models.cpu_kernels import add_norm_bf16, narrow, norm_bf16, rotate_bf16, widen
from kvfold.pages.kernels import amx
from kvfold.pages.kernels.avx512 import LANES, emitted, gated, index, load, load_bf16, loop, pointer, store, transposed
from kvfold.pages.kernels.cpu_jit import address_of, compiled, done, floats_on_line, pointer_to, take, wait

OUTPUTS = 2 * LANES  # of a block of weights
ROWS = 2 * LANES  # that tiles take at once
QKV_PHASES, MLP_PHASES = 3, 5
_BLOCK_BYTES = 1 << 20  # of a block of rows, which stays in a core's second cache
_MOST_ROWS, _FEWEST_ROWS = 512, 128  # of a block
_LINE_BYTES = 4 * OUTPUTS  # of a row of sums
_FEW = 32  # rows of a part, where none is multiplied


def _further(builder: Any, address: Any, number: int) -> Any:
    return builder.add(address, index(number))


def _emit_products(builder: Any, x: Any, w: Any, size: Any, sums: Any) -> None:
    """Sums [32 rows, 32 outputs] of rows of `size` bytes."""
    rows = [x, builder.add(x, builder.mul(index(LANES), size))]
    for tile in range(4):
        amx.zero(builder, tile)

    def add(done: Any, _: Any) -> list[Any]:
        """32 inputs."""
        panel = builder.add(w, builder.mul(done, index(OUTPUTS)))
        for j in range(2):
            place = pointer(builder, _further(builder, panel, amx.TILE_BYTES * j))
            amx.load_tile(builder, 6 + j, place, index(amx.ROW_BYTES))
        for i, row in enumerate(rows):
            amx.load_tile(builder, 4 + i, pointer(builder, builder.add(row, done)), size)
            for j in range(2):
                amx.multiply(builder, 2 * i + j, 4 + i, 6 + j)
        return []

    loop(builder, index(0), size, amx.ROW_BYTES, [], add)
    for tile in range(4):
        place = _further(builder, sums, _LINE_BYTES * LANES * (tile // 2) + amx.ROW_BYTES * (tile % 2))
        amx.store_tile(builder, tile, pointer(builder, place), index(_LINE_BYTES))


def _emit_pack(builder: Any, w: Any, size: Any, out: Any) -> None:
    """32 rows of weights of `size` bytes as pair panels, two for each 32 inputs."""

    def pack(done: Any, _: Any) -> list[Any]:
        for half in range(2):
            first = builder.add(w, builder.add(builder.mul(size, index(LANES * half)), done))
            rows = [
                load(builder, pointer(builder, builder.add(first, builder.mul(size, index(i))))) for i in range(LANES)
            ]
            target = builder.add(out, builder.mul(done, index(OUTPUTS)))
            for i, pairs in enumerate(transposed(builder, rows)):
                place = _further(builder, target, amx.TILE_BYTES * half + amx.ROW_BYTES * i)
                store(builder, pairs, pointer(builder, place))
        return []

    loop(builder, index(0), size, amx.ROW_BYTES, [], pack)


def _sums_of(builder: Any, y: Any, n: Any) -> list[Any]:
    """The two registers of a row of sums."""
    row = builder.add(y, builder.mul(n, index(_LINE_BYTES)))
    return [load(builder, pointer(builder, _further(builder, row, amx.ROW_BYTES * j))) for j in range(2)]


def _rounded(builder: Any, sums: Sequence[Any]) -> list[Any]:
    """Two registers of fp32 numbers as bf16 ones, in fp32 again."""
    halves, kind = amx.narrowed(builder, *sums), ir.VectorType(ir.IntType(32), LANES)
    nothing = ir.Constant(halves.type, ir.Undefined)
    found = []
    for first in (0, LANES):
        lanes = ir.Constant(kind, list(range(first, first + LANES)))
        bits = builder.zext(builder.shuffle_vector(halves, nothing, lanes), kind)
        found.append(builder.bitcast(builder.shl(bits, ir.Constant(kind, [16] * LANES)), sums[0].type))
    return found


def _put(builder: Any, sums: Sequence[Any], out: Any, n: Any, stride: Any) -> None:
    """A row of 32 outputs as bf16."""
    store(builder, amx.pairs_of(builder, *sums), pointer(builder, builder.add(out, builder.mul(n, stride))))


def _emit_biased(builder: Any, y: Any, count: Any, bias: Any, out: Any, stride: Any) -> None:
    biases = [load(builder, pointer(builder, _further(builder, bias, amx.ROW_BYTES * j))) for j in range(2)]

    def put(n: Any, _: Any) -> list[Any]:
        sums = [builder.fadd(*pair) for pair in zip(_sums_of(builder, y, n), biases, strict=True)]
        _put(builder, sums, out, n, stride)
        return []

    loop(builder, index(0), count, 1, [], put)


def _emit_gated(builder: Any, gate: Any, up: Any, count: Any, out: Any, stride: Any) -> None:
    def put(n: Any, _: Any) -> list[Any]:
        sums = [_rounded(builder, _sums_of(builder, y, n)) for y in (gate, up)]
        _put(builder, gated(builder, *sums), out, n, stride)
        return []

    loop(builder, index(0), count, 1, [], put)


def _emit_added(builder: Any, y: Any, count: Any, out: Any, stride: Any) -> None:
    """Added to bf16 numbers that are there."""

    def put(n: Any, _: Any) -> list[Any]:
        sums = _rounded(builder, _sums_of(builder, y, n))
        row = builder.add(out, builder.mul(n, stride))
        more = [load_bf16(builder, pointer(builder, _further(builder, row, 2 * LANES * j))) for j in range(2)]
        _put(builder, [builder.fadd(*pair) for pair in zip(sums, more, strict=True)], out, n, stride)
        return []

    loop(builder, index(0), count, 1, [], put)


_products, _pack = emitted(_emit_products), emitted(_emit_pack)
_biased, _gated, _added = emitted(_emit_biased), emitted(_emit_gated), emitted(_emit_added)


@compiled
def _block_of(num_rows: int, size: int) -> int:
    """Rows of a block, a multiple of 32, where each has so many inputs."""
    most = min(_MOST_ROWS, max(_FEWEST_ROWS, _BLOCK_BYTES // (2 * size) // ROWS * ROWS))
    num_blocks = max(1, -(-num_rows // most))
    return -(-num_rows // num_blocks // ROWS) * ROWS


@compiled
def _place(part: int, num_outputs: int, num_rows: int, block: int) -> tuple[int, int, int]:
    """The rows of a part, first and end, and the first of its 32 outputs: all of one block of rows, then the next."""
    per_block = num_outputs // OUTPUTS
    first = part // per_block * block
    return first, min(first + block, num_rows), part % per_block * OUTPUTS


@compiled
def _num_parts(num_outputs: int, num_rows: int, block: int) -> int:
    return -(-num_rows // block) * (num_outputs // OUTPUTS)


@compiled
def _multiply(x_NX: Any, first: int, end: int, w: int, sums: int) -> None:
    """Sums of rows first:end with 32 packed outputs; there is room for rows up to a multiple of 32."""
    size = 2 * x_NX.shape[1]
    for n in range(first, end, ROWS):
        _products((address_of(x_NX) + n * size, w, size, sums + _LINE_BYTES * (n - first)))


@compiled
def _pack_part(part: int, weights: Any, sizes: Any, out: int) -> None:
    """32 outputs of some layers, which are packed one behind the other."""
    o = OUTPUTS * part
    for i in range(len(weights)):
        num_outputs, size = sizes[i]
        if o < num_outputs:
            _pack((weights[i] + 2 * size * o, 2 * size, out + 2 * size * o))
            return
        o -= num_outputs
        out += 2 * num_outputs * size


@compiled
def _num_packed(sizes: Any) -> int:
    count = 0
    for num_outputs, _ in sizes:
        count += num_outputs // OUTPUTS
    return count


@compiled
def _rows_of(part: int, num_rows: int) -> Any:
    return slice(_FEW * part, min(num_rows, _FEW * (part + 1)))


@compiled
def _wide(address: int, size: int) -> Any:
    """bf16 numbers as fp32; zeros where there are none."""
    found = np.zeros(size, np.float32)
    if address != 0:
        widen(carray(pointer_to(address), (size,), np.uint16), found)
    return found


@compiled
def qkv(phase_PX: Any, layer_C: Any, epsilon: float, room: Any, angles: Any) -> None:
    """Queries, keys and values of the norm of x; queries and keys rotated, as fp32."""
    x_NM, y_NM, w, rows_3 = room.x_NM, room.y_NM, address_of(room.w_X), (room.q_NX, room.k_NX, room.v_NX)
    (num_rows, size), num_q, num_kv = x_NM.shape, rows_3[0].shape[1], rows_3[1].shape[1]
    weights, sizes = (layer_C[Q], layer_C[K], layer_C[V]), ((num_q, size), (num_kv, size), (num_kv, size))
    num_packed, num_few = _num_packed(sizes), -(-num_rows // _FEW)
    phase, weight_M = phase_PX[0], _wide(layer_C[BEFORE], size)
    part = take(phase)
    while part < num_packed + num_few:
        if part < num_packed:
            _pack_part(part, weights, sizes, w)
        else:
            mine = _rows_of(part - num_packed, num_rows)
            norm_bf16(x_NM[mine], y_NM[mine], weight_M, epsilon)
        done(phase)
        part = take(phase)
    wait(phase, num_packed + num_few)

    block, num_outputs, phase = _block_of(num_rows, size), num_q + 2 * num_kv, phase_PX[1]
    num_parts, sum_X = _num_parts(num_outputs, num_rows, block), floats_on_line(block * OUTPUTS)
    biases = _wide(layer_C[Q_BIAS], num_q), _wide(layer_C[K_BIAS], num_kv), _wide(layer_C[V_BIAS], num_kv)
    amx.configure(())
    part = take(phase)
    while part < num_parts:
        first, end, o = _place(part, num_outputs, num_rows, block)
        _multiply(y_NM, first, end, w + 2 * size * o, address_of(sum_X))
        i = 0
        if o >= num_q:
            i, o = 1 + (o - num_q) // num_kv, (o - num_q) % num_kv
        width = 2 * rows_3[i].shape[1]
        target, bias = address_of(rows_3[i]) + width * first + 2 * o, address_of(biases[i]) + 4 * o
        _biased((address_of(sum_X), end - first, bias, target, width))
        done(phase)
        part = take(phase)
    amx.release(())
    wait(phase, num_parts)

    phase, part = phase_PX[2], take(phase_PX[2])
    while part < num_few:
        mine = _rows_of(part, num_rows)
        rotate_bf16(room.q_NX[mine], room.rotated_q_NX[mine], angles[0][mine], angles[1][mine])
        rotate_bf16(room.k_NX[mine], room.rotated_k_NX[mine], angles[0][mine], angles[1][mine])
        done(phase)
        part = take(phase)
    wait(phase, num_few)


@compiled
def mlp(phase_PX: Any, layer_C: Any, epsilon: float, room: Any) -> None:
    """The output projection and the MLP, with what is added before and after, which becomes `sum_NM`."""
    x_NM, y_NM, sum_NM, w, gate_NK = room.x_NM, room.y_NM, room.sum_NM, address_of(room.w_X), room.gate_NK
    (num_rows, size), num_attended, num_gated = x_NM.shape, room.bf16_NX.shape[1], gate_NK.shape[1]
    weights = layer_C[OUT], layer_C[GATE], layer_C[UP], layer_C[DOWN]
    sizes = (size, num_attended), (num_gated, size), (num_gated, size), (size, num_gated)
    gate_w = w + 2 * size * num_attended
    up_w, down_w = gate_w + 2 * num_gated * size, gate_w + 4 * num_gated * size
    num_packed, num_few, phase = _num_packed(sizes), -(-num_rows // _FEW), phase_PX[0]
    part = take(phase)
    while part < num_packed + num_few:
        if part < num_packed:
            _pack_part(part, weights, sizes, w)
        else:
            mine = _rows_of(part - num_packed, num_rows)
            for n in range(mine.start, mine.stop):
                narrow(room.attended_NX[n], room.bf16_NX[n])
        done(phase)
        part = take(phase)
    wait(phase, num_packed + num_few)

    block, nothing = _block_of(num_rows, max(num_attended, num_gated)), np.zeros(OUTPUTS, np.float32)
    sum_X, up_X = floats_on_line(block * OUTPUTS), floats_on_line(block * OUTPUTS)
    phase, num_parts = phase_PX[1], _num_parts(size, num_rows, block)
    amx.configure(())
    part = take(phase)
    while part < num_parts:
        first, end, o = _place(part, size, num_rows, block)
        _multiply(room.bf16_NX, first, end, w + 2 * num_attended * o, address_of(sum_X))
        target = address_of(y_NM) + 2 * (size * first + o)
        _biased((address_of(sum_X), end - first, address_of(nothing), target, 2 * size))
        done(phase)
        part = take(phase)
    wait(phase, num_parts)

    phase, weight_M = phase_PX[2], _wide(layer_C[AFTER], size)
    part = take(phase)
    while part < num_few:
        mine = _rows_of(part, num_rows)
        add_norm_bf16(x_NM[mine], y_NM[mine], sum_NM[mine], y_NM[mine], weight_M, epsilon)
        done(phase)
        part = take(phase)
    wait(phase, num_few)

    phase, num_parts = phase_PX[3], _num_parts(num_gated, num_rows, block)
    part = take(phase)
    while part < num_parts:
        first, end, o = _place(part, num_gated, num_rows, block)
        _multiply(y_NM, first, end, gate_w + 2 * size * o, address_of(sum_X))
        _multiply(y_NM, first, end, up_w + 2 * size * o, address_of(up_X))
        target = address_of(gate_NK) + 2 * (num_gated * first + o)
        _gated((address_of(sum_X), address_of(up_X), end - first, target, 2 * num_gated))
        done(phase)
        part = take(phase)
    wait(phase, num_parts)

    phase, num_parts = phase_PX[4], _num_parts(size, num_rows, block)
    part = take(phase)
    while part < num_parts:
        first, end, o = _place(part, size, num_rows, block)
        _multiply(gate_NK, first, end, down_w + 2 * num_gated * o, address_of(sum_X))
        _added((address_of(sum_X), end - first, address_of(sum_NM) + 2 * (size * first + o), 2 * size))
        done(phase)
        part = take(phase)
    amx.release(())
    wait(phase, num_parts)
