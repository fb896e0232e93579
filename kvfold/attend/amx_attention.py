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

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.amx_layout import SLOTS, further, lay_out, pack_queries
from kvfold.attend.panel_call import Arguments, PanelCall, panels_of_unit
from kvfold.attend.panels import COLUMN, Softmax, finish, locate
from kvfold.attend.stored_parts import LENGTH
from kvfold.core import has_amx_kernels
from kvfold.pages.kernels.amx import DEPTH, ROW_BYTES, configure, load_tile, multiply, release, store_tile, zero
from kvfold.pages.kernels.avx512 import LANES, at, emitted, everywhere, index, load, loop, pointer, store
from kvfold.pages.kernels.cpu_jit import compiled, done, floats_on_line, take, wait
from kvfold.pages.kernels.cpu_threads import run_phases

ROOM_BYTES = 64 << 20  # for slots as tiles read them, or for those of one head
_MOST_PANELS = 4  # of a unit
_SCORE_BYTES = SLOTS * COLUMN  # of a panel
_SLOTS_OF_TURN = 8

_WHOLE, _ROW = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)


def _all(number: int) -> Any:
    return ir.Constant(_WHOLE, [number] * LANES)


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
                load_tile(builder, tile, further(builder, place, channel, 2), row_bytes)
            for product in products:
                multiply(builder, *product)
            return []

        loop(builder, index(0), head_dim, DEPTH, [], add)
        for i, (sums, _a, _b) in enumerate(products):
            half, panel = divmod(i, num_panels)
            place = further(builder, out, builder.add(slot, index(SLOTS * panel + LANES * half)), COLUMN)
            store_tile(builder, sums, place, index(COLUMN))
        return []

    loop(builder, index(0), count, DEPTH, [], score)


def _emit_values(num_panels: int, builder: Any, weight: Any, v: Any, out: Any, count: Any, head_dim: Any) -> None:
    """Products of weights and values of `count` slots are added to the output, [panel, channel, 16 rows]."""
    a, b, products = _tiles(num_panels)

    def update(channel: Any, _: Any) -> list[Any]:
        first, places = builder.add(v, builder.mul(channel, index(2 * SLOTS))), []
        for i, (sums, _a, _b) in enumerate(products):
            half, panel = divmod(i, num_panels)
            number = builder.add(builder.add(builder.mul(index(panel), head_dim), channel), index(LANES * half))
            places.append(further(builder, out, number, COLUMN))
            load_tile(builder, sums, places[-1], index(COLUMN))

        def add(slot: Any, _: Any) -> list[Any]:
            for i, tile in enumerate(b):
                place = builder.add(weight, index(i * _SCORE_BYTES))
                load_tile(builder, tile, further(builder, place, slot, ROW_BYTES // 2), index(ROW_BYTES))
            for i, tile in enumerate(a):
                place = builder.add(first, index(i * LANES * 2 * SLOTS))
                load_tile(builder, tile, further(builder, place, slot, 2), index(2 * SLOTS))
            for product in products:
                multiply(builder, *product)
            return []

        loop(builder, index(0), count, DEPTH, [], add)
        for (sums, _a, _b), place in zip(products, places, strict=True):
            store_tile(builder, sums, place, index(COLUMN))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], update)


def _weight_pairs(builder: Any, low: Any, high: Any) -> Any:
    """As `paired` of amx.py, ties up instead of to even, which takes half the instructions."""
    low, high = (builder.add(builder.bitcast(row, _WHOLE), _all(0x8000)) for row in (low, high))
    return builder.bitcast(builder.or_(builder.lshr(low, _all(16)), builder.and_(high, _all(-0x10000))), _ROW)


def _emit_softmax(builder: Any, score: Any, count: Any, state: Any, scale: Any) -> None:
    """Scores of a panel become weights, as a pair panel where they are: a pair is two slots."""
    target, turns = pointer(builder, score), [(_SLOTS_OF_TURN, index(0), count)]

    def put(first: Any, weights: list[Any]) -> None:
        for i in range(0, len(weights), 2):
            pair = builder.lshr(builder.add(first, index(i)), index(1))
            store(builder, _weight_pairs(builder, *weights[i : i + 2]), at(builder, target, pair, index(LANES)))

    softmax = Softmax(builder, score, state, scale, _MOST_PANELS, is_rounded=True)
    softmax.end(softmax.weigh(turns, softmax.begin(turns), put))


def _emit_hide(builder: Any, score: Any, seen: Any, begin: Any, first: Any, count: Any) -> None:
    """Slots of a panel, from `first` on, that a row does not see; `seen`: how many each does, as int64."""
    score, numbers = pointer(builder, score), ir.VectorType(ir.IntType(64), LANES)
    seen = builder.load(builder.inttoptr(seen, numbers.as_pointer()), align=8)
    no_lanes = ir.Constant(numbers, ir.Undefined)

    def hide(slot: Any, _: Any) -> list[Any]:
        place = at(builder, score, slot, index(LANES))
        lane_0 = builder.insert_element(no_lanes, builder.add(begin, slot), ir.Constant(ir.IntType(32), 0))
        number = builder.shuffle_vector(lane_0, no_lanes, _all(0))
        is_seen = builder.icmp_signed("<", number, seen)
        store(builder, builder.select(is_seen, load(builder, place), everywhere(-float("inf"))), place)
        return []

    loop(builder, first, count, 1, [], hide)


def _emit_scale(builder: Any, out: Any, alpha: Any, head_dim: Any) -> None:
    """The output of a panel times alpha, unless that is 1 everywhere."""
    out, factor = pointer(builder, out), load(builder, pointer(builder, alpha))
    changes = builder.bitcast(builder.fcmp_unordered("!=", factor, everywhere(1.0)), ir.IntType(LANES))
    end = builder.select(builder.icmp_unsigned("==", changes, ir.Constant(ir.IntType(LANES), 0)), index(0), head_dim)

    def scale(channel: Any, _: Any) -> list[Any]:
        for i in range(4):
            place = at(builder, out, builder.add(channel, index(i)), index(LANES))
            store(builder, builder.fmul(load(builder, place), factor), place)
        return []

    loop(builder, index(0), end, 4, [], scale)


_scores_1, _scores_2 = (emitted(partial(_emit_scores, i)) for i in (1, 2))
_values_1, _values_2 = (emitted(partial(_emit_values, i)) for i in (1, 2))
_softmax, _hide, _scale = emitted(_emit_softmax), emitted(_emit_hide), emitted(_emit_scale)


@compiled
def _read(num_panels: int, k: int, v: int, begin: int, count: int, own: Any, head_dim: int) -> None:
    """A block of slots, of which there are whole tiles. `own`: the unit's queries, output, scores that become
    weights, its sums and maxima, and slots that rows see."""
    q, out, score, state, seen_R, scale = own
    for panel in range(0, num_panels, 2):
        arguments = q + 2 * LANES * panel * head_dim, k, score + panel * _SCORE_BYTES, count, head_dim
        if panel + 1 < num_panels:
            _scores_2(arguments)
        else:
            _scores_1(arguments)
    for panel in range(num_panels):
        mine, seen, state_of = score + panel * _SCORE_BYTES, seen_R[panel * LANES], state + panel * COLUMN
        if begin + count > seen:
            _hide((mine, seen_R.ctypes.data + 8 * panel * LANES, begin, max(seen - begin, 0), count))
        _softmax((mine, count, state_of, scale))
        _scale((out + panel * head_dim * COLUMN, state_of + 2 * _MOST_PANELS * COLUMN, head_dim))
    for panel in range(0, num_panels, 2):
        arguments = score + panel * _SCORE_BYTES, v, out + panel * head_dim * COLUMN, count, head_dim
        if panel + 1 < num_panels:
            _values_2(arguments)
        else:
            _values_1(arguments)


@compiled
def _sequence_of(number: int, first_X: Any) -> int:
    """The one whose numbers begin at or before this one."""
    s = 0
    while first_X[s + 1] <= number:
        s += 1
    return s


@compiled
def attend_blocks(
    addresses: Any,
    strides: Any,
    part_SHP4: Any,
    place_3X: Any,
    shape: Any,
    scale: Any,
    lse_HR: Any,
    k_HBSD: Any,
    v_HBDS: Any,
    phase_PX: Any,
) -> None:
    """Blocks of slots, then units of rows, as threads take them; a thread may be through before the others are.

    `place_3X`: of each sequence the first query and the first block of its own, both with the end, and its slots.
    `shape`: KV heads, group, blocks that are of all sequences, 1 where a query hides a slot more than the next one
    does, head dim, most panels of a unit."""
    num_heads, group, num_shared, hidden, head_dim, most = shape
    query_X, block_X, slots_S = place_3X[0], place_3X[1], place_3X[2]
    num_sequences, num_blocks = len(slots_S) - 1, k_HBSD.shape[1]
    unit_X = np.zeros(num_sequences + 1, np.int64)
    for s in range(num_sequences):
        unit_X[s + 1] = unit_X[s] + -(-(query_X[s + 1] - query_X[s]) * group // (most * LANES))
    num_units = unit_X[-1]
    room_SD = np.empty((SLOTS, head_dim), np.uint16)
    part = take(phase_PX[0])
    while part < num_heads * num_blocks:
        head, block = part // num_blocks, part % num_blocks
        s = _sequence_of(block, block_X) if block >= num_shared else 0
        begin = SLOTS * (block if block < num_shared else num_shared + block - block_X[s])
        k_SD, v_DS = k_HBSD[head, block], v_HBDS[head, block]
        lay_out(part_SHP4[s, head], begin, min(SLOTS, slots_S[s] - begin), strides[6:], k_SD, v_DS, room_SD)
        done(phase_PX[0])
        part = take(phase_PX[0])
    wait(phase_PX[0], num_heads * num_blocks)

    out_X, score_X = floats_on_line(_MOST_PANELS * head_dim * LANES), floats_on_line(_MOST_PANELS * SLOTS * LANES)
    q_X, mine_2 = floats_on_line(_MOST_PANELS * head_dim * LANES // 2), np.empty(2, np.int64)
    state, row_3X = np.empty((3, _MOST_PANELS * LANES), np.float32), np.empty((3, _MOST_PANELS * LANES), np.int64)
    nowhere = np.empty(head_dim, np.float32)
    configure(())
    part = take(phase_PX[1])
    while part < num_heads * num_units:
        # In the loop: numba frees an array behind the last line that names it.
        q, out, score = q_X.ctypes.data, out_X.ctypes.data, score_X.ctypes.data
        head, unit = part // num_units, part % num_units
        s = _sequence_of(unit, unit_X)
        first, num_queries = (unit - unit_X[s]) * most * LANES, query_X[s + 1] - query_X[s]
        num_rows = num_queries * group
        num_panels = min(most, -(-(num_rows - first) // LANES))
        filled = num_panels * LANES
        row_R, target_R, seen_R = row_3X[0, :filled], row_3X[1, :filled], row_3X[2, :filled]
        for side in range(2):
            mine_2[side] = addresses[side] + 4 * query_X[s] * strides[3 * side + 2]
        numbers = group, num_queries, slots_S[s], hidden
        locate(mine_2, strides, numbers, head, first, row_3X[:, :filled], nowhere.ctypes.data)
        for panel in range(num_panels):
            pack_queries((row_R.ctypes.data + 8 * panel * LANES, q + 2 * LANES * panel * head_dim, head_dim))
        state[0], state[1] = -np.inf, 0
        out_X[:] = 0
        own = q, out, score, state.ctypes.data, seen_R, scale.ctypes.data
        end = seen_R[filled - 1]
        for begin in range(0, end, SLOTS):
            count = -(-min(SLOTS, end - begin) // DEPTH) * DEPTH
            block = begin // SLOTS
            if block >= num_shared:
                block += block_X[s] - num_shared
            k, v = k_HBSD[head, block].ctypes.data, v_HBDS[head, block].ctypes.data
            _read(num_panels, k, v, begin, count, own, head_dim)
        mine = slice(query_X[s] * group + first, query_X[s] * group + min(first + filled, num_rows))
        finish(out, state, scale[0], target_R, head_dim, lse_HR[head, mine])
        done(phase_PX[1])
        part = take(phase_PX[1])
    release(())


class _Batch(NamedTuple):
    """The first arguments of `attend_blocks`."""

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    part_SHP4: NDArray[np.int64]
    place_3X: NDArray[np.int64]
    shape: tuple[int, int, int, int, int, int]
    scale_1: NDArray[np.float32]
    lse_HR: NDArray[np.float32]

    def of_heads(self, heads: slice) -> _Batch:
        between = self.strides[[0, 3]]  # fp32 numbers from head to head, of queries and of the output
        return self._replace(
            addresses=self.addresses + 4 * heads.start * between,
            part_SHP4=np.ascontiguousarray(self.part_SHP4[:, heads]),
            shape=(heads.stop - heads.start, *self.shape[1:]),
            lse_HR=self.lse_HR[heads],
        )

    def run(self, num_threads: int) -> None:
        """Some heads at a time, as many as there is room for."""
        num_heads, head_dim, num_blocks = self.shape[0], self.shape[4], int(self.place_3X[1, -1])
        size = num_blocks * SLOTS * head_dim
        most = max(1, min(num_heads, ROOM_BYTES // (4 * size)))
        room_2HX = floats_on_line(most * size).view(np.uint16).reshape(2, most, size)
        for first in range(0, num_heads, most):
            mine = self.of_heads(slice(first, min(first + most, num_heads)))
            k_HX, v_HX = room_2HX[:, : mine.shape[0]]
            k_HBSD = k_HX.reshape(-1, num_blocks, SLOTS, head_dim)
            v_HBDS = v_HX.reshape(-1, num_blocks, head_dim, SLOTS)
            run_phases(partial(attend_blocks, *mine, k_HBSD, v_HBDS), 2, num_threads)


def _run(arguments: Arguments, num_threads: int) -> None:
    num_heads, group, num_queries, num_slots, hidden, head_dim, most = arguments.shape
    place_3X = np.array([[0, num_queries], [0, -(-num_slots // SLOTS)], [num_slots, 0]])
    shape = num_heads, group, 0, hidden, head_dim, most
    parts = arguments.part_HP4[np.newaxis]
    _Batch(arguments.addresses, arguments.strides, parts, place_3X, shape, *arguments[-2:]).run(num_threads)


def places_of(lens: Sequence[int], slots_S: NDArray[np.int64], num_stored: int) -> tuple[NDArray[np.int64], int]:
    """`place_3X` of sequences that share their first slots, and how many blocks are of all of them."""
    shared = num_stored // SLOTS
    block_X = shared + np.cumsum([0, *(-(-slots_S // SLOTS) - shared)])
    return np.stack([np.cumsum([0, *lens]), block_X, np.append(slots_S, 0)]), shared


def panels_of(lens: Sequence[int], num_heads: int, group: int) -> int:
    """The most of a unit."""
    num_panels = num_heads * sum(-(-length * group // LANES) for length in lens)
    return panels_of_unit(_MOST_PANELS, num_panels, torch.get_num_threads())


def units_of(lens: Sequence[int], num_heads: int, group: int, most: int) -> int:
    return num_heads * sum(-(-length * group // (most * LANES)) for length in lens)


def attend_behind(
    q_HGND: Tensor,
    lens: Sequence[int],
    part_SHP4: NDArray[np.int64],
    num_stored: int,
    scale: float,
    strides: tuple[int, int],
) -> Tensor:
    """Causal attention of several sequences' queries, one behind the other, each to slots of its own of which the first
    `num_stored` are the same; returns the output [H, G, N, D], whose rows have the bits that they have alone.

    `strides`: of keys and values, from slot to slot."""
    num_heads, group, num_rows, head_dim = q_HGND.shape
    out_HGND = q_HGND.new_empty(num_rows, num_heads, group, head_dim).permute(1, 2, 0, 3)
    place_3X, num_shared = places_of(lens, part_SHP4[:, 0, :, LENGTH].sum(1), num_stored)
    shape = num_heads, group, num_shared, 1, head_dim, panels_of(lens, num_heads, group)
    addresses = np.array([q_HGND.data_ptr(), out_HGND.data_ptr()])
    between = np.array([*q_HGND.stride()[:3], *out_HGND.stride()[:3], *strides])
    lse_HR = np.empty((num_heads, num_rows * group), dtype=np.float32)
    scale_1 = np.array([scale], dtype=np.float32)
    _Batch(addresses, between, part_SHP4, place_3X, shape, scale_1, lse_HR).run(torch.get_num_threads())
    return out_HGND


def _reads_head_dim(head_dim: int) -> bool:
    """Whole tiles."""
    return has_amx_kernels() and head_dim % DEPTH == 0 and head_dim > 0


CALL = PanelCall(_run, _MOST_PANELS, _reads_head_dim, attend_behind)
