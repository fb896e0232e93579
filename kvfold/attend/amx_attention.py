"""Attention of many queries on a CPU with AMX (FlashAttention's online softmax), for prefill of bf16 models.

As avx512_attention.py, with tiles of bf16 products: 16 x 16 sums of 32 products in one instruction. Queries, keys and
values are rounded to bf16, which such a model's numbers are already; scores and sums are fp32. Weights are rounded to
bf16 for their products with values, and not for their sum.

A first phase lays slots out as tiles read them, in blocks of 128 from slot 0 on, zeros behind the last one: keys
[slot, channel], values [channel, slot]. The second takes units of rows, panel after panel of 16:

    scores[slot, 16 rows] = k[slot] . q      out[channel, 16 rows] = out * alpha + v[channel, slot] * weight[slot]

What a row gives depends neither on the rows beside it, nor on how a prompt is cut into chunks, nor on where its slots
lie, as long as values are finite: a hidden slot has weight 0, and 0 times NaN is NaN.

    H KV heads   G query heads per KV head   T queries   D head dim   S slots
    R rows of a KV head: query t of head g is row t * G + g
    P parts of a head's slots, one behind the other   B blocks of slots
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from kvfold.attend.panel_call import Arguments, PanelCall
from kvfold.attend.panels import COLUMN, emit_softmax, finish, locate
from kvfold.attend.stored_parts import IS_BF16, LENGTH
from kvfold.core import has_amx_kernels
from kvfold.pages.kernels.amx import (
    DEPTH,
    ROW_BYTES,
    configure,
    load_tile,
    multiply,
    paired,
    pairs_of,
    release,
    store_tile,
    zero,
)
from kvfold.pages.kernels.avx512 import LANES, at, emitted, everywhere, index, load, loop, pointer, store, transposed
from kvfold.pages.kernels.cpu_jit import compiled, done, take, wait
from kvfold.pages.kernels.cpu_threads import run_phases

_SLOTS = 128  # of a block
_MOST_PANELS = 4
_LINE = LANES * ROW_BYTES  # bytes of 16 rows of a tile, one behind the other

_HALF = ir.IntType(16)
_HALVES, _WHOLE = ir.VectorType(_HALF, LANES), ir.VectorType(ir.IntType(32), LANES)


def _further(builder: Any, address: Any, number: Any, size: int) -> Any:
    """The place so many pieces of so many bytes behind an address."""
    return pointer(builder, builder.add(address, builder.mul(number, index(size))))


def _emit_slot(is_bf16: bool, builder: Any, source: Any, target: Any, head_dim: Any) -> None:
    """A slot as bf16."""
    target = pointer(builder, target)

    def copy(channel: Any, _: Any) -> list[Any]:
        place = _further(builder, source, channel, 2 if is_bf16 else 4)
        found = load(builder, place)
        if not is_bf16:
            found = pairs_of(builder, found, load(builder, at(builder, place, index(LANES))))
        store(builder, found, at(builder, target, builder.lshr(channel, index(1))))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], copy)


def _emit_turned(builder: Any, v: Any, target: Any, head_dim: Any) -> None:
    """16 slots of bf16 values, [slot, channel], as columns of [channel, slot]."""
    row_bytes = builder.shl(head_dim, index(1))

    def turn(channel: Any, _: Any) -> list[Any]:
        first = builder.add(v, builder.shl(channel, index(1)))
        rows = [
            load(builder, pointer(builder, builder.add(first, builder.mul(index(slot), row_bytes))))
            for slot in range(LANES)
        ]
        place = builder.add(target, builder.mul(channel, index(2 * _SLOTS)))
        for i, pairs in enumerate(transposed(builder, rows)):
            bits = builder.bitcast(pairs, _WHOLE)
            for side in range(2):
                half = builder.trunc(builder.lshr(bits, ir.Constant(_WHOLE, [16 * side] * LANES)), _HALVES)
                store_at = builder.add(place, index(2 * _SLOTS * (2 * i + side)))
                builder.store(half, builder.inttoptr(store_at, _HALVES.as_pointer()), align=2)
        return []

    loop(builder, index(0), head_dim, DEPTH, [], turn)


def _emit_queries(builder: Any, rows: Any, panel: Any, head_dim: Any) -> None:
    """16 rows of fp32 as a pair panel; `rows`: where their addresses are."""
    addresses = builder.inttoptr(rows, index(0).type.as_pointer())
    places = [pointer(builder, builder.load(builder.gep(addresses, [index(i)]))) for i in range(LANES)]
    target = pointer(builder, panel)

    def pack(channel: Any, _: Any) -> list[Any]:
        found = []
        for place in places:
            low, high = (load(builder, at(builder, place, builder.add(channel, index(i)))) for i in (0, LANES))
            found.append(pairs_of(builder, low, high))
        for i, pairs in enumerate(transposed(builder, found)):
            pair = builder.add(builder.lshr(channel, index(1)), index(i))
            store(builder, pairs, at(builder, target, pair, index(LANES)))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], pack)


def _tiles(num_panels: int) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
    """Tiles of two rows of tiles `a` and of panels `b`, and (sums, a, b) of their products."""
    a, b = [0, 1], [2 + i for i in range(num_panels)]
    pairs = [(x, y) for x in a for y in b]
    return a, b, [(4 + i, *pair) for i, pair in enumerate(pairs)]


def _emit_scores(num_panels: int, builder: Any, q: Any, k: Any, out: Any, count: Any, head_dim: Any) -> None:
    """Scores of slots, 32 at a time, [panel, slot, 16 rows]."""
    a, b, products = _tiles(num_panels)
    row_bytes, panel_bytes = builder.shl(head_dim, index(1)), builder.shl(head_dim, index(5))

    def score(slot: Any, _: Any) -> list[Any]:
        first = builder.add(k, builder.mul(slot, row_bytes))
        for sums, _a, _b in products:
            zero(builder, sums)

        def add(channel: Any, _: Any) -> list[Any]:
            for i, tile in enumerate(b):
                place = builder.add(q, builder.add(builder.mul(index(i), panel_bytes), builder.shl(channel, index(5))))
                load_tile(builder, tile, pointer(builder, place), index(ROW_BYTES))
            for i, tile in enumerate(a):
                place = builder.add(first, builder.mul(index(LANES * i), row_bytes))
                load_tile(builder, tile, _further(builder, place, channel, 2), row_bytes)
            for product in products:
                multiply(builder, *product)
            return []

        loop(builder, index(0), head_dim, DEPTH, [], add)
        for i, (sums, _a, _b) in enumerate(products):
            half, panel = divmod(i, num_panels)
            place = _further(builder, out, builder.add(slot, index(_SLOTS * panel + LANES * half)), COLUMN)
            store_tile(builder, sums, place, index(COLUMN))
        return []

    loop(builder, index(0), count, DEPTH, [], score)


def _emit_values(num_panels: int, builder: Any, weight: Any, v: Any, out: Any, count: Any, head_dim: Any) -> None:
    """Products of weights and values of `count` slots are added to the output, [panel, channel, 16 rows]."""
    a, b, products = _tiles(num_panels)

    def update(channel: Any, _: Any) -> list[Any]:
        first, places = builder.add(v, builder.mul(channel, index(2 * _SLOTS))), []
        for i, (sums, _a, _b) in enumerate(products):
            half, panel = divmod(i, num_panels)
            number = builder.add(builder.add(builder.mul(index(panel), head_dim), channel), index(LANES * half))
            places.append(_further(builder, out, number, COLUMN))
            load_tile(builder, sums, places[-1], index(COLUMN))

        def add(slot: Any, _: Any) -> list[Any]:
            for i, tile in enumerate(b):
                place = builder.add(weight, index(i * _SLOTS // 2 * ROW_BYTES))
                load_tile(builder, tile, _further(builder, place, slot, ROW_BYTES // 2), index(ROW_BYTES))
            for i, tile in enumerate(a):
                place = builder.add(first, index(i * LANES * 2 * _SLOTS))
                load_tile(builder, tile, _further(builder, place, slot, 2), index(2 * _SLOTS))
            for product in products:
                multiply(builder, *product)
            return []

        loop(builder, index(0), count, DEPTH, [], add)
        for (sums, _a, _b), place in zip(products, places, strict=True):
            store_tile(builder, sums, place, index(COLUMN))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], update)


def _emit_softmax(builder: Any, score: Any, count: Any, state: Any, scale: Any, weight: Any) -> None:
    """Scores of a panel become weights, as a pair panel: a pair is two slots."""
    target = pointer(builder, weight)

    def put(first: Any, weights: list[Any]) -> None:
        for i in range(0, len(weights), 2):
            pair = builder.lshr(builder.add(first, index(i)), index(1))
            store(builder, paired(builder, *weights[i : i + 2]), at(builder, target, pair, index(LANES)))

    emit_softmax(builder, score, count, state, scale, _MOST_PANELS, put, is_whole=True)


def _emit_hide(builder: Any, score: Any, seen: Any, begin: Any, first: Any, count: Any) -> None:
    """Slots of a panel, from `first` on, that a row does not see; `seen`: how many each does, as int64."""
    score, numbers = pointer(builder, score), ir.VectorType(ir.IntType(64), LANES)
    seen = builder.load(builder.inttoptr(seen, numbers.as_pointer()), align=8)
    no_lanes = ir.Constant(numbers, ir.Undefined)

    def hide(slot: Any, _: Any) -> list[Any]:
        place = at(builder, score, slot, index(LANES))
        lane_0 = builder.insert_element(no_lanes, builder.add(begin, slot), ir.Constant(ir.IntType(32), 0))
        number = builder.shuffle_vector(lane_0, no_lanes, ir.Constant(_WHOLE, [0] * LANES))
        is_seen = builder.icmp_signed("<", number, seen)
        store(builder, builder.select(is_seen, load(builder, place), everywhere(-float("inf"))), place)
        return []

    loop(builder, first, count, 1, [], hide)


def _emit_scale(builder: Any, out: Any, alpha: Any, head_dim: Any) -> None:
    """The output of a panel times alpha, unless that is 1 everywhere."""
    out, factor = pointer(builder, out), load(builder, pointer(builder, alpha))
    changes = builder.bitcast(builder.fcmp_unordered("!=", factor, everywhere(1.0)), _HALF)
    end = builder.select(builder.icmp_unsigned("==", changes, ir.Constant(_HALF, 0)), index(0), head_dim)

    def scale(channel: Any, _: Any) -> list[Any]:
        for i in range(4):
            place = at(builder, out, builder.add(channel, index(i)), index(LANES))
            store(builder, builder.fmul(load(builder, place), factor), place)
        return []

    loop(builder, index(0), end, 4, [], scale)


_narrow_slot, _copy_slot = emitted(partial(_emit_slot, False)), emitted(partial(_emit_slot, True))
_turned, _queries = emitted(_emit_turned), emitted(_emit_queries)
_scores_1, _scores_2 = (emitted(partial(_emit_scores, i)) for i in (1, 2))
_values_1, _values_2 = (emitted(partial(_emit_values, i)) for i in (1, 2))
_softmax, _hide, _scale = emitted(_emit_softmax), emitted(_emit_hide), emitted(_emit_scale)


@compiled
def _aligned(room: Any) -> int:
    """Where its first cache line begins."""
    return (room.ctypes.data + ROW_BYTES - 1) // ROW_BYTES * ROW_BYTES


@compiled
def _lay_out(part_P4: Any, begin: int, count: int, strides: Any, k_SD: Any, v_DS: Any, room_SD: Any) -> None:
    """A block of slots, from slot `begin` of a head on."""
    part, skip, filled, head_dim = 0, begin, 0, k_SD.shape[1]
    while skip >= part_P4[part, LENGTH]:
        skip -= part_P4[part, LENGTH]
        part += 1
    while filled < count:
        taken, is_bf16 = min(part_P4[part, LENGTH] - skip, count - filled), part_P4[part, IS_BF16]
        for side in range(2):
            size = 2 if is_bf16 else 4
            source = part_P4[part, side] + skip * strides[side] * size
            target = (room_SD if side else k_SD).ctypes.data + 2 * filled * head_dim
            for slot in range(taken):
                row = source + slot * strides[side] * size, target + 2 * slot * head_dim, head_dim
                if is_bf16:
                    _copy_slot(row)
                else:
                    _narrow_slot(row)
        part, skip, filled = part + 1, 0, filled + taken
    whole = -(-filled // DEPTH) * DEPTH
    k_SD[filled:whole] = 0
    room_SD[filled:whole] = 0
    for slot in range(0, whole, LANES):
        _turned((room_SD.ctypes.data + 2 * slot * head_dim, v_DS.ctypes.data + 2 * slot, head_dim))


@compiled
def _read(num_panels: int, k: int, v: int, begin: int, count: int, own: Any, head_dim: int) -> None:
    """A block of slots, of which there are whole tiles. `own`: the unit's queries, output, scores and weights, and its
    sums, maxima and slots that rows see."""
    q, out, score, weight, state, seen_R, scale = own
    for panel in range(0, num_panels, 2):
        arguments = q + 2 * LANES * panel * head_dim, k, score + panel * _SLOTS * COLUMN, count, head_dim
        if panel + 1 < num_panels:
            _scores_2(arguments)
        else:
            _scores_1(arguments)
    for panel in range(num_panels):
        mine, seen, state_of = score + panel * _SLOTS * COLUMN, seen_R[panel * LANES], state + panel * COLUMN
        if begin + count > seen:
            _hide((mine, seen_R.ctypes.data + 8 * panel * LANES, begin, max(seen - begin, 0), count))
        _softmax((mine, count, state_of, scale, weight + panel * (_SLOTS // 2) * ROW_BYTES))
        _scale((out + panel * head_dim * COLUMN, state_of + 2 * _MOST_PANELS * COLUMN, head_dim))
    for panel in range(0, num_panels, 2):
        arguments = weight + panel * (_SLOTS // 2) * ROW_BYTES, v, out + panel * head_dim * COLUMN, count, head_dim
        if panel + 1 < num_panels:
            _values_2(arguments)
        else:
            _values_1(arguments)


@compiled
def _attend(
    addresses: Any,
    strides: Any,
    part_HP4: Any,
    shape: Any,
    scale: Any,
    lse_HR: Any,
    k_HBSD: Any,
    v_HBDS: Any,
    phase_PX: Any,
) -> None:
    """Blocks of slots, then units of rows, as threads take them."""
    num_heads, group, num_queries, num_slots, _, head_dim, most = shape
    num_rows, num_blocks = group * num_queries, k_HBSD.shape[1]
    num_units = -(-num_rows // (most * LANES))
    room_SD = np.empty((_SLOTS, head_dim), np.uint16)
    block = take(phase_PX[0])
    while block < num_heads * num_blocks:
        head, begin = block // num_blocks, block % num_blocks * _SLOTS
        k_SD, v_DS = k_HBSD[head, block % num_blocks], v_HBDS[head, block % num_blocks]
        _lay_out(part_HP4[head], begin, min(_SLOTS, num_slots - begin), strides[6:], k_SD, v_DS, room_SD)
        done(phase_PX[0])
        block = take(phase_PX[0])
    wait(phase_PX[0], num_heads * num_blocks)

    out_XL = np.empty((_MOST_PANELS * head_dim + 1, LANES), np.float32)
    score_XL = np.empty((_MOST_PANELS * _SLOTS + 1, LANES), np.float32)
    weight_XL = np.empty((_MOST_PANELS * _SLOTS // 2 + 1, LANES), np.float32)
    q_XL = np.empty((_MOST_PANELS * head_dim // 2 + 1, LANES), np.float32)
    state, row_3X = np.empty((3, _MOST_PANELS * LANES), np.float32), np.empty((3, _MOST_PANELS * LANES), np.int64)
    nowhere = np.empty(head_dim, np.float32)
    configure(())
    unit = take(phase_PX[1])
    while unit < num_heads * num_units:
        # Asked for in each turn: numba frees an array behind the last line that names it.
        q, out, score, weight = _aligned(q_XL), _aligned(out_XL), _aligned(score_XL), _aligned(weight_XL)
        head, first = unit // num_units, unit % num_units * most * LANES
        num_panels = min(most, -(-(num_rows - first) // LANES))
        filled = num_panels * LANES
        row_R, target_R, seen_R = row_3X[0, :filled], row_3X[1, :filled], row_3X[2, :filled]
        locate(addresses, strides, shape[1:5], head, first, row_3X[:, :filled], nowhere.ctypes.data)
        for panel in range(num_panels):
            _queries((row_R.ctypes.data + 8 * panel * LANES, q + 2 * LANES * panel * head_dim, head_dim))
        state[0], state[1] = -np.inf, 0
        out_XL[:] = 0
        own = q, out, score, weight, state.ctypes.data, seen_R, scale.ctypes.data
        end = seen_R[filled - 1]
        for begin in range(0, end, _SLOTS):
            count = -(-min(_SLOTS, end - begin) // DEPTH) * DEPTH
            block = begin // _SLOTS
            _read(
                num_panels,
                k_HBSD[head, block].ctypes.data,
                v_HBDS[head, block].ctypes.data,
                begin,
                count,
                own,
                head_dim,
            )
        finish(out, state, scale[0], target_R, head_dim, lse_HR[head, first : min(first + filled, num_rows)])
        unit = take(phase_PX[1])
    release(())


def _run(arguments: Arguments, num_threads: int) -> None:
    num_heads, _, _, num_slots, _, head_dim, _ = arguments.shape
    room = torch.empty(2, num_heads, -(-num_slots // _SLOTS), _SLOTS * head_dim, dtype=torch.uint16).numpy()
    k_HBSD = room[0].reshape(num_heads, -1, _SLOTS, head_dim)
    v_HBDS = room[1].reshape(num_heads, -1, head_dim, _SLOTS)
    run_phases(lambda phase_PX: _attend(*arguments, k_HBSD, v_HBDS, phase_PX), 2, num_threads)


def _reads_head_dim(head_dim: int) -> bool:
    """Whole tiles."""
    return has_amx_kernels() and head_dim % DEPTH == 0 and head_dim > 0


CALL = PanelCall(_run, _MOST_PANELS, _reads_head_dim)
can_attend, attend, attend_parts = CALL.can_attend, CALL.attend, CALL.attend_parts
