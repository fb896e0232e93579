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
import torch
from torch import Tensor

from kvfold.attend.stored_parts import IS_BF16, LENGTH, Parts, part_of, reads_head_dim
from kvfold.pages.kernels.avx512 import (
    LANES,
    MOST_PANELS,
    OUTPUTS,
    Tile,
    at,
    emitted,
    everywhere,
    exponential,
    fma,
    index,
    load,
    load_bf16,
    loop,
    pack_square,
    pointer,
    spread,
    store,
    store_columns,
)
from kvfold.pages.kernels.cpu_jit import compiled, take
from kvfold.pages.kernels.cpu_threads import run_parts

_SLOTS = 128  # that are read at once
_COLUMN = 4 * LANES  # bytes
_UNROLLED = 4  # slots of a turn of a loop


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


def _larger(builder: Any, found: Any, most: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", found, most), found, most)


def _emit_softmax(builder: Any, score: Any, count: Any, state: Any, scale: Any) -> None:
    """Scores of a panel become weights. `state`: largest score, sum of weights, and what the output is to be scaled by,
    [3, panel, 16 rows]; `scale`: where it is."""
    score, state = pointer(builder, score), pointer(builder, state)
    most_at, sum_at, alpha_at = (at(builder, state, index(LANES * MOST_PANELS * i)) for i in range(3))
    factor = spread(builder, builder.load(pointer(builder, scale)))

    def larger(first: Any, values: Any) -> list[Any]:
        """In as many registers as values, slot after slot."""
        places = (at(builder, score, builder.add(first, index(i)), index(LANES)) for i in range(len(values)))
        found = [load(builder, place) for place in places]
        return [_larger(builder, *pair) for pair in zip(found, values, strict=True)]

    before, whole = load(builder, most_at), builder.and_(count, index(-_UNROLLED))
    most, *others = loop(builder, index(0), whole, _UNROLLED, [before] * _UNROLLED, larger)
    for other in others:
        most = _larger(builder, other, most)
    (most,) = loop(builder, whole, count, 1, [most], larger)
    shift = builder.fsub(everywhere(0.0), builder.fmul(most, factor))
    alpha = exponential(builder, fma(builder, before, factor, shift))

    def weigh(first: Any, values: Any) -> list[Any]:
        """The same; sums run over slots in order."""
        (total,) = values
        for i in range(num_unrolled):
            place = at(builder, score, builder.add(first, index(i)), index(LANES))
            weight = exponential(builder, fma(builder, load(builder, place), factor, shift))
            store(builder, weight, place)
            total = builder.fadd(total, weight)
        return [total]

    totals = [builder.fmul(load(builder, sum_at), alpha)]
    for num_unrolled, begin, end in ((_UNROLLED, index(0), whole), (1, whole, count)):
        totals = loop(builder, begin, end, num_unrolled, totals, weigh)
    (total,) = totals
    for values, place in ((most, most_at), (total, sum_at), (alpha, alpha_at)):
        store(builder, values, place)


def _emit_output(builder: Any, out: Any, total: Any, rows: Any, channel: Any) -> None:
    """8 channels of a panel, over the sums of weights, to rows; `rows`: where their addresses are."""
    out, total = pointer(builder, out), pointer(builder, total)
    factor = builder.fdiv(everywhere(1.0), load(builder, total))
    channels = [at(builder, out, builder.add(channel, index(i)), index(LANES)) for i in range(OUTPUTS)]
    columns = [builder.fmul(load(builder, place), factor) for place in channels]
    addresses = builder.inttoptr(rows, index(0).type.as_pointer())
    found = [builder.load(builder.gep(addresses, [index(i)])) for i in range(LANES)]
    store_columns(builder, columns, [at(builder, pointer(builder, address), channel) for address in found])


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
_softmax, _output = emitted(_emit_softmax), emitted(_emit_output)
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
        _scored(num_panels, q, k + 4 * slot * k_stride, score + slot * _COLUMN, head_dim, k_stride)
    if begin + count > seen_R[0]:
        _hide(score_XL, seen_R, begin, count)
    for panel in range(num_panels):
        _softmax((score + panel * _SLOTS * _COLUMN, count, state + panel * _COLUMN, scale))
    alpha = state + 2 * MOST_PANELS * _COLUMN
    for channel in range(0, head_dim, OUTPUTS):
        _added(num_panels, score, v + 4 * channel, out + channel * _COLUMN, alpha, count, head_dim, v_stride)


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
    """Units of rows, as threads take them. Addresses and strides (of heads, groups, queries) of queries and output,
    and strides of keys and values from slot to slot."""
    num_heads, group, num_queries, num_slots, head_dim, hidden, most = shape
    num_rows = group * num_queries
    num_units = -(-num_rows // (most * LANES))
    q_XL, out_XL = np.empty((2, MOST_PANELS * head_dim, LANES), np.float32)
    score_XL, state = (
        np.empty((MOST_PANELS * _SLOTS, LANES), np.float32),
        np.empty((3, MOST_PANELS * LANES), np.float32),
    )
    room_2SD = np.empty((2, _SLOTS, head_dim), np.float32)
    row_R, target_R, seen_R = np.empty((3, MOST_PANELS * LANES), np.int64)
    nowhere = np.empty(head_dim, np.float32)
    unit = take(counter)
    while unit < num_heads * num_units:
        head, first = unit // num_units, unit % num_units * most * LANES
        num_panels = min(most, -(-(num_rows - first) // LANES))
        for i in range(num_panels * LANES):
            t, g = divmod(min(first + i, num_rows - 1), group)
            row_R[i] = addresses[0] + 4 * (head * strides[0] + g * strides[1] + t * strides[2])
            target_R[i] = addresses[1] + 4 * (head * strides[3] + g * strides[4] + t * strides[5])
            seen_R[i] = num_slots - hidden * (num_queries - 1 - t)
            if first + i >= num_rows:
                target_R[i] = nowhere.ctypes.data
        _packed(row_R, num_panels * LANES, head_dim, q_XL.ctypes.data)
        state[0], state[1] = -np.inf, 0
        out_XL[:] = 0
        own = out_XL.ctypes.data, state.ctypes.data, seen_R[: num_panels * LANES], scale.ctypes.data
        between = strides[6], strides[7]
        _read_parts(num_panels, q_XL.ctypes.data, part_HP4[head], own, (score_XL, room_2SD), between, head_dim)
        for panel in range(num_panels):
            total = state.ctypes.data + (MOST_PANELS + panel) * _COLUMN
            for channel in range(0, head_dim, OUTPUTS):
                mine = out_XL.ctypes.data + panel * head_dim * _COLUMN
                _output((mine, total, target_R.ctypes.data + 8 * panel * LANES, channel))
        for i in range(min(num_panels * LANES, num_rows - first)):
            lse_HR[head, first + i] = state[0, i] * scale[0] + np.log(state[1, i])
        unit = take(counter)


def can_attend(q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> bool:
    """Whether shapes and layouts are such as the kernel reads."""
    is_read = all(
        x.dtype == torch.float32 and x.stride(-1) == 1 and not x.requires_grad for x in (q_HGTD, k_HSD, v_HSD)
    )
    are_even = q_HGTD.shape[-1] == k_HSD.shape[-1] == v_HSD.shape[-1]
    return is_read and are_even and scale > 0 and reads_head_dim(q_HGTD.shape[-1])


def attend(q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [H, G, T, D] and natural-log-sum-exp [H, G, T]."""
    return attend_parts(q_HGTD, part_of(k_HSD, v_HSD), scale, (k_HSD.stride(1), v_HSD.stride(1)), causal=causal)


def attend_parts(
    q_HGTD: Tensor, part_HP4: Parts, scale: float, strides: tuple[int, int], *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The same over parts of which each head has as many slots; `strides` of keys and values from slot to slot."""
    num_heads, group, num_queries, head_dim = q_HGTD.shape
    out_HGTD = q_HGTD.new_empty(num_queries, num_heads, group, head_dim).permute(1, 2, 0, 3)
    lse_HR = np.empty((num_heads, num_queries * group), dtype=np.float32)
    num_threads, num_units = torch.get_num_threads(), -(-num_queries * group // (LANES * MOST_PANELS))
    most = MOST_PANELS if num_heads * num_units >= num_threads else 1
    addresses = np.array([q_HGTD.data_ptr(), out_HGTD.data_ptr()])
    all_strides = np.array([*q_HGTD.stride()[:3], *out_HGTD.stride()[:3], *strides])
    shape = num_heads, group, num_queries, int(part_HP4[0, :, LENGTH].sum()), head_dim, int(causal), most
    scale_1 = np.array([scale], dtype=np.float32)

    rest = addresses, all_strides, part_HP4, shape, scale_1, lse_HR
    run_parts(lambda counter: _attend(*rest, counter), num_threads)
    lse = torch.from_numpy(lse_HR).view(num_heads, num_queries, group).transpose(1, 2)
    return out_HGTD, lse
