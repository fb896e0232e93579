"""Attention of many queries on a CPU with AVX-512 (FlashAttention's online softmax), for prefill.

PyTorch's kernel for CPUs masks a chunk that follows others by a matrix, and computes both halves of a causal square.
Here one call reads a stored prefix, earlier chunks and the chunk itself, and stops where a query sees nothing more.
Queries of a KV head, those of its group as well, fill panels of 16 lanes (pages/kernels/avx512.py); slots are read
where they are, 128 at a time:

    scores[slot, 16 rows] = k[slot] . q      out[channel, 16 rows] = out * alpha + v[slot, channel] * weight[slot]

What a row gives depends neither on the rows beside it, nor on how a prompt is cut into chunks, nor on where its slots
lie.

    H KV heads   G query heads per KV head   T queries   D head dim   S slots
    R rows of a KV head: query t of head g is row t * G + g
    P parts of a head's slots, one behind the other
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvfold.attend.panel_call import Arguments, PanelCall
from kvfold.attend.panels import COLUMN, UNROLLED, Softmax, finish, locate
from kvfold.attend.stored_parts import IS_BF16, LENGTH, reads_head_dim
from kvfold.pages.kernels.avx512 import (
    LANES,
    MOST_PANELS,
    OUTPUTS,
    Tile,
    at,
    emitted,
    everywhere,
    index,
    load,
    load_bf16,
    loop,
    pack_square,
    pointer,
    store,
)
from kvfold.pages.kernels.cpu_jit import compiled, take
from kvfold.pages.kernels.cpu_threads import run_parts

_SLOTS = 128  # that are read at once


def _emit_scores(num_panels: int, builder: Any, q: Any, k: Any, out: Any, head_dim: Any, k_stride: Any) -> None:
    """Scores of 8 slots, [panel, slot, 16 rows]."""
    q, k, out = (pointer(builder, address) for address in (q, k, out))
    panels = [at(builder, q, builder.mul(index(LANES * i), head_dim)) for i in range(num_panels)]
    slots = [at(builder, k, index(i), k_stride) for i in range(OUTPUTS)]
    sums = Tile(builder, panels, slots, index(1)).run(head_dim, [everywhere(0.0)] * (OUTPUTS * num_panels))
    for i, values in enumerate(sums):
        slot, panel = divmod(i, num_panels)
        store(builder, values, at(builder, out, index(LANES * (_SLOTS * panel + slot))))


def _emit_values(
    num_panels: int, builder: Any, weight: Any, v: Any, out: Any, alpha: Any, count: Any, head_dim: Any, stride: Any
) -> None:
    """8 channels of the output, [panel, channel, 16 rows], with the values of `count` slots."""
    weight, v, out, alpha = (pointer(builder, address) for address in (weight, v, out, alpha))
    panels = [at(builder, weight, index(LANES * _SLOTS * i)) for i in range(num_panels)]
    channels = [at(builder, v, index(i)) for i in range(OUTPUTS)]
    factors = [load(builder, at(builder, alpha, index(LANES * i))) for i in range(num_panels)]
    places = [
        at(builder, out, builder.mul(builder.add(builder.mul(index(panel), head_dim), index(i)), index(LANES)))
        for i in range(OUTPUTS)
        for panel in range(num_panels)
    ]
    before = [builder.fmul(load(builder, place), factors[i % num_panels]) for i, place in enumerate(places)]
    for values, place in zip(Tile(builder, panels, channels, stride).run(count, before), places, strict=True):
        store(builder, values, place)


def _emit_softmax(builder: Any, score: Any, count: Any, state: Any, scale: Any) -> None:
    """Scores of a panel become weights, where they are."""
    place = pointer(builder, score)

    def put(first: Any, weights: list[Any]) -> None:
        for i, weight in enumerate(weights):
            store(builder, weight, at(builder, place, builder.add(first, index(i)), index(LANES)))

    whole = builder.and_(count, index(-UNROLLED))
    turns = (UNROLLED, index(0), whole), (1, whole, count)
    softmax = Softmax(builder, score, state, scale, MOST_PANELS)
    softmax.end(softmax.weigh(turns, softmax.begin(turns), put))


def _emit_copy(read: Callable[..., Any], size: int, builder: Any, source: Any, target: Any, head_dim: Any) -> None:
    """A slot, of numbers of so many bytes, as fp32; the last 16 channels may overlap those before them."""
    target, last = pointer(builder, target), builder.sub(head_dim, index(LANES))

    def copy(channel: Any, _: Any) -> list[Any]:
        begin = builder.select(builder.icmp_signed("<", channel, last), channel, last)
        place = pointer(builder, builder.add(source, builder.mul(begin, index(size))))
        store(builder, read(builder, place), at(builder, target, begin))
        return []

    loop(builder, index(0), head_dim, LANES, [], copy)


_scores_1, _scores_2, _scores_3 = (emitted(partial(_emit_scores, i)) for i in range(1, MOST_PANELS + 1))
_values_1, _values_2, _values_3 = (emitted(partial(_emit_values, i)) for i in range(1, MOST_PANELS + 1))
_softmax = emitted(_emit_softmax)
_copy_row, _widen_row = emitted(partial(_emit_copy, load, 4)), emitted(partial(_emit_copy, load_bf16, 2))


@compiled
def _scored(num_panels: int, q: int, k: int, out: int, head_dim: int, stride: int) -> None:
    if num_panels == 1:
        _scores_1((q, k, out, head_dim, stride))
    elif num_panels == 2:
        _scores_2((q, k, out, head_dim, stride))
    else:
        _scores_3((q, k, out, head_dim, stride))


@compiled
def _added(num_panels: int, weight: int, v: int, out: int, alpha: int, count: int, head_dim: int, stride: int) -> None:
    if num_panels == 1:
        _values_1((weight, v, out, alpha, count, head_dim, stride))
    elif num_panels == 2:
        _values_2((weight, v, out, alpha, count, head_dim, stride))
    else:
        _values_3((weight, v, out, alpha, count, head_dim, stride))


@compiled
def _packed(row_R: Any, num_rows: int, head_dim: int, panel: int) -> None:
    """Rows at these addresses as panels."""
    for first in range(0, num_rows, LANES):
        for channel in range(0, head_dim, LANES):
            rows = row_R.ctypes.data + 8 * first
            pack_square((rows, min(channel, head_dim - LANES), panel + 4 * first * head_dim))


@compiled
def _hide(score_XL: Any, seen_R: Any, begin: int, count: int) -> None:
    """Slots from `begin` on that a row does not see."""
    for r in range(len(seen_R)):
        for slot in range(max(seen_R[r] - begin, 0), count):
            score_XL[(r // LANES) * _SLOTS + slot, r % LANES] = -np.inf


@compiled
def _copied(part_P4: Any, index: int, skip: int, count: int, strides: Any, room_2SD: Any) -> None:
    """`count` slots behind the first `skip` of a part, and zeros up to a whole tile."""
    head_dim, done = room_2SD.shape[2], 0
    while done < count:
        taken, is_bf16 = min(part_P4[index, LENGTH] - skip, count - done), part_P4[index, IS_BF16]
        for side in range(2):
            size = 2 if is_bf16 else 4
            source = part_P4[index, side] + skip * strides[side] * size
            target = room_2SD[side].ctypes.data + 4 * done * head_dim
            for slot in range(taken):
                row = source + slot * strides[side] * size, target + 4 * slot * head_dim, head_dim
                if is_bf16:
                    _widen_row(row)
                else:
                    _copy_row(row)
        index, skip, done = index + 1, 0, done + taken
    room_2SD[:, done : -(-done // OUTPUTS) * OUTPUTS] = 0


@compiled
def _read(num_panels: int, q: int, k: int, v: int, begin: int, count: int, own: Any, score_XL: Any, sizes: Any) -> None:
    """A block of slots, of which there are whole tiles. `own`: the panels' sums, maxima, and slots that rows see;
    `sizes`: head dim, strides of keys and values."""
    out, state, seen_R, scale = own
    head_dim, k_stride, v_stride = sizes
    score = score_XL.ctypes.data
    for slot in range(0, count, OUTPUTS):
        _scored(num_panels, q, k + 4 * slot * k_stride, score + slot * COLUMN, head_dim, k_stride)
    if begin + count > seen_R[0]:
        _hide(score_XL, seen_R, begin, count)
    for panel in range(num_panels):
        _softmax((score + panel * _SLOTS * COLUMN, count, state + panel * COLUMN, scale))
    alpha = state + 2 * MOST_PANELS * COLUMN
    for channel in range(0, head_dim, OUTPUTS):
        _added(num_panels, score, v + 4 * channel, out + channel * COLUMN, alpha, count, head_dim, v_stride)


@compiled
def _read_parts(num_panels: int, q: int, part_P4: Any, own: Any, room: Any, strides: Any, head_dim: int) -> None:
    """All slots that the last row sees, block by block: in place where a block lies in one part, else copied."""
    score_XL, room_2SD = room
    seen_R, index, before = own[2], 0, 0  # slots before this part
    end = seen_R[len(seen_R) - 1]
    for begin in range(0, end, _SLOTS):
        while begin >= before + part_P4[index, LENGTH]:
            before += part_P4[index, LENGTH]
            index += 1
        count, skip = min(_SLOTS, end - begin), begin - before
        is_whole = skip + count <= part_P4[index, LENGTH] and count % OUTPUTS == 0
        if is_whole and not part_P4[index, IS_BF16]:
            k = part_P4[index, 0] + 4 * skip * strides[0]
            v = part_P4[index, 1] + 4 * skip * strides[1]
            _read(num_panels, q, k, v, begin, count, own, score_XL, (head_dim, strides[0], strides[1]))
        else:
            _copied(part_P4, index, skip, count, strides, room_2SD)
            k, v = room_2SD[0].ctypes.data, room_2SD[1].ctypes.data
            _read(num_panels, q, k, v, begin, count, own, score_XL, (head_dim, head_dim, head_dim))


@compiled
def _attend(addresses: Any, strides: Any, part_HP4: Any, shape: Any, scale: Any, lse_HR: Any, counter: Any) -> None:
    """Units of rows, as threads take them."""
    num_heads, group, num_queries, _, _, head_dim, most = shape
    num_rows = group * num_queries
    num_units = -(-num_rows // (most * LANES))
    q_XL, out_XL = np.empty((2, MOST_PANELS * head_dim, LANES), np.float32)
    score_XL, state = (
        np.empty((MOST_PANELS * _SLOTS, LANES), np.float32),
        np.empty((3, MOST_PANELS * LANES), np.float32),
    )
    room_2SD = np.empty((2, _SLOTS, head_dim), np.float32)
    row_3X = np.empty((3, MOST_PANELS * LANES), np.int64)
    nowhere = np.empty(head_dim, np.float32)
    unit = take(counter)
    while unit < num_heads * num_units:
        head, first = unit // num_units, unit % num_units * most * LANES
        num_panels = min(most, -(-(num_rows - first) // LANES))
        filled = num_panels * LANES
        row_R, target_R, seen_R = row_3X[0, :filled], row_3X[1, :filled], row_3X[2, :filled]
        locate(addresses, strides, shape[1:5], head, first, row_3X[:, :filled], nowhere.ctypes.data)
        _packed(row_R, filled, head_dim, q_XL.ctypes.data)
        state[0], state[1] = -np.inf, 0
        out_XL[:] = 0
        own = out_XL.ctypes.data, state.ctypes.data, seen_R, scale.ctypes.data
        between = strides[6], strides[7]
        _read_parts(num_panels, q_XL.ctypes.data, part_HP4[head], own, (score_XL, room_2SD), between, head_dim)
        lse_R = lse_HR[head, first : min(first + filled, num_rows)]
        finish(out_XL.ctypes.data, state, scale[0], target_R, head_dim, lse_R)
        unit = take(counter)


def _run(arguments: Arguments, num_threads: int) -> None:
    run_parts(lambda counter: _attend(*arguments, counter), num_threads)


CALL = PanelCall(_run, MOST_PANELS, reads_head_dim)
