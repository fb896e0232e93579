"""Decode attention on a CPU with AVX-512: tasks of cpu_kernels.py; those with biases and fp8 codes run there.

Few queries read a slot, so lanes are channels here (pages/kernels/avx512.py): 16 slots' products are summed to one
register, slot by slot, and values are added to outputs that stay in registers. fp32 slots are read where they are;
bf16 ones, integer codes, and keys behind the last whole 16 are made fp32 first.

    T tasks   R rows (sequence, KV head)   G query heads per KV head   D head dim, whole registers   S slots of a block
"""

from __future__ import annotations

from functools import partial as bound
from typing import Any

import numpy as np
from llvmlite import ir

from kvfold.attend import cpu_kernels
from kvfold.attend.cpu_kernels import (
    BF16,
    BIAS,
    F32,
    FP8,
    INT2,
    INT4,
    INT8,
    K_CODE,
    K_FORM,
    LENGTH,
    ROW,
    SKIP,
    V_CODE,
    V_FORM,
    Floats,
    slot_width,
)
from kvfold.pages.kernels.avx512 import (
    LANES,
    at,
    emitted,
    everywhere,
    exponential,
    fma,
    index,
    lane_sums,
    load,
    load_bf16,
    loop,
    pointer,
    spread,
    store,
)
from kvfold.pages.kernels.cpu_jit import compiled, take

_SLOTS = 128  # of a block
_WIDE = 4  # registers of an output that are added to at once


def _emit_dots(builder: Any, q: Any, k: Any, out: Any, head_dim: Any) -> None:
    """Products of a query with 16 slots."""
    q, k, out = (pointer(builder, address) for address in (q, k, out))
    slots = [at(builder, k, index(i), head_dim) for i in range(LANES)]

    def add(channel: Any, sums: Any) -> list[Any]:
        factor = load(builder, at(builder, q, channel))
        return [
            fma(builder, load(builder, at(builder, slot, channel)), factor, x)
            for slot, x in zip(slots, sums, strict=True)
        ]

    store(builder, lane_sums(builder, loop(builder, index(0), head_dim, LANES, [everywhere(0.0)] * LANES, add)), out)


def _emit_weights(builder: Any, score: Any, count: Any, top: Any, total: Any) -> None:
    """e**(score - top) of a multiple of 16 scores, and the sums of their lanes; `top`: where it is."""
    score, total = pointer(builder, score), pointer(builder, total)
    most = spread(builder, builder.load(pointer(builder, top)))

    def weigh(slot: Any, sums: Any) -> list[Any]:
        place = at(builder, score, slot)
        weight = exponential(builder, builder.fsub(load(builder, place), most))
        store(builder, weight, place)
        return [builder.fadd(sums[0], weight)]

    store(builder, loop(builder, index(0), count, LANES, [everywhere(0.0)], weigh)[0], total)


def _emit_mix(num_registers: int, builder: Any, weight: Any, v: Any, out: Any, count: Any, head_dim: Any) -> None:
    """So many registers of an output with the values of `count` slots."""
    weight, v, out = (pointer(builder, address) for address in (weight, v, out))
    places = [at(builder, out, index(LANES * i)) for i in range(num_registers)]

    def add(slot: Any, sums: Any) -> list[Any]:
        factor, row = spread(builder, builder.load(at(builder, weight, slot))), at(builder, v, slot, head_dim)
        columns = [load(builder, at(builder, row, index(LANES * i))) for i in range(num_registers)]
        return [fma(builder, x, factor, y) for x, y in zip(columns, sums, strict=True)]

    sums = loop(builder, index(0), count, 1, [load(builder, place) for place in places], add)
    for x, place in zip(sums, places, strict=True):
        store(builder, x, place)


def _emit_unpack(bits: int, builder: Any, source: Any, target: Any, num_slots: Any, width: Any) -> None:
    """Integer codes as fp32; channels that share a place in their bytes are adjacent (codec/packing.py). `width`: bytes
    of a slot, whole registers."""
    num_planes = 8 // bits
    codes, whole = (ir.VectorType(ir.IntType(size), LANES) for size in (8, 32))
    source, target = builder.inttoptr(source, ir.IntType(8).as_pointer()), pointer(builder, target)

    def unpack(slot: Any, _: Any) -> list[Any]:
        row, out = at(builder, source, slot, width), at(builder, target, builder.mul(slot, index(num_planes)), width)

        def part(i: Any, _: Any) -> list[Any]:
            code = builder.load(builder.bitcast(at(builder, row, i), codes.as_pointer()), align=1)
            for plane in range(num_planes):
                mine = builder.lshr(code, ir.Constant(codes, [plane * bits] * LANES))
                mine = builder.and_(mine, ir.Constant(codes, [(1 << bits) - 1] * LANES))
                place = at(builder, at(builder, out, i), index(plane), width)
                store(builder, builder.uitofp(builder.zext(mine, whole), everywhere(0.0).type), place)
            return []

        return loop(builder, index(0), width, LANES, [], part)

    loop(builder, index(0), num_slots, 1, [], unpack)


def _emit_copy(read: Any, builder: Any, source: Any, target: Any, count: Any) -> None:
    """A multiple of 16 numbers as fp32."""
    size = {load: 4, load_bf16: 2}[read]

    def copy(i: Any, _: Any) -> list[Any]:
        place = pointer(builder, builder.add(source, builder.mul(i, index(size))))
        store(builder, read(builder, place), at(builder, pointer(builder, target), i))
        return []

    loop(builder, index(0), count, LANES, [], copy)


_dots, _weights = emitted(_emit_dots), emitted(_emit_weights)
_mix_wide, _mix = emitted(bound(_emit_mix, _WIDE)), emitted(bound(_emit_mix, 1))
_copy, _widen = emitted(bound(_emit_copy, load)), emitted(bound(_emit_copy, load_bf16))
_unpack_8, _unpack_4, _unpack_2 = (emitted(bound(_emit_unpack, bits)) for bits in (8, 4, 2))


@compiled
def _is_served(tasks: Any, t: int, head_dim: int) -> bool:
    if tasks[t, BIAS] != 0:
        return False
    for form in (tasks[t, K_FORM], tasks[t, V_FORM]):
        if form == FP8 or (form > FP8 and slot_width(form, head_dim) % LANES != 0):
            return False
    return True


@compiled
def _floats(form: int, address: int, count: int, head_dim: int, room: int, is_whole: bool) -> int:
    """Where slots are as fp32, with a whole number of 16 slots; `room` for those that are not so in place."""
    if form == BF16:
        _widen((address, room, count * head_dim))
    elif form == INT8:
        _unpack_8((address, room, count, head_dim))
    elif form == INT4:
        _unpack_4((address, room, count, head_dim // 2))
    elif form == INT2:
        _unpack_2((address, room, count, head_dim // 4))
    elif not is_whole:
        _copy((address, room, count * head_dim))
    return address if form == F32 and is_whole else room


@compiled
def _read_grid(tasks: Any, t: int, code: int, first: int, count: int, halves: Any, bits_4S: Any, row: int) -> None:
    """Scales and zeros of a block, of which `bits_4S` has rows `row` and the next."""
    for i in range(2):
        place = tasks[t, code + 1 + i] // 2 + first
        for s in range(count):
            bits_4S[row + i, s] = np.uint32(halves[place + s]) << np.uint32(16)


# A view of an array takes longer to make than a short task: these take addresses.


@compiled
def _weigh(count: int, score_S: Any, top_2: Any, total_L: Any) -> Any:
    """Scores become weights. Their sum, and the factor of earlier sums; `top_2`: the largest score so far."""
    whole, top = -(-count // LANES) * LANES, top_2[0]
    for s in range(count, whole):
        score_S[s] = -np.inf
    for s in range(count):
        top = max(top, score_S[s])
    shrink = np.exp(top_2[0] - top) if top > top_2[0] else np.float32(1)
    top_2[0] = top
    _weights((score_S.ctypes.data, whole, top_2.ctypes.data, total_L.ctypes.data))
    total = np.float32(0)
    for i in range(LANES):
        total += total_L[i]
    return total, shrink


@compiled
def _mixed(score: int, v: int, out: int, count: int, head_dim: int) -> None:
    channel = 0
    while channel < head_dim:
        place = score, v + 4 * channel, out + 4 * channel, count, head_dim
        if head_dim - channel >= _WIDE * LANES:
            _mix_wide(place)
            channel += _WIDE * LANES
        else:
            _mix(place)
            channel += LANES


@compiled
def _attend(tasks: Any, t: int, q_RGD: Any, offset_RG: Any, memory: int, halves: Any, partial: Any, room: Any) -> None:
    out_TGD, top_TG, sum_TG = partial
    slot_2SD, score_S, total_L, top_2, grid_4S, bits_4S = room
    group, head_dim = q_RGD.shape[1:]
    begin, end, k_form, v_form = tasks[t, SKIP], tasks[t, LENGTH], tasks[t, K_FORM], tasks[t, V_FORM]
    q = np.int64(q_RGD.ctypes.data) + 4 * tasks[t, ROW] * group * head_dim
    score, slot = np.int64(score_S.ctypes.data), np.int64(slot_2SD.ctypes.data)
    for g in range(group):
        top_TG[t, g], sum_TG[t, g] = -np.inf, 0
        for d in range(head_dim):
            out_TGD[t, g, d] = 0
    for first in range(begin, end, _SLOTS):
        count = min(_SLOTS, end - first)
        is_whole = count % LANES == 0
        v = memory + tasks[t, V_CODE] + slot_width(v_form, head_dim) * first
        v = _floats(v_form, v, count, head_dim, slot + 4 * _SLOTS * head_dim, True)
        k = memory + tasks[t, K_CODE] + slot_width(k_form, head_dim) * first
        k = _floats(k_form, k, count, head_dim, slot, is_whole)
        if k_form > FP8:
            _read_grid(tasks, t, K_CODE, first, count, halves, bits_4S, 0)
        if v_form > FP8:
            _read_grid(tasks, t, V_CODE, first, count, halves, bits_4S, 2)
        for g in range(group):
            for s in range(0, count, LANES):
                _dots((q + 4 * head_dim * g, k + 4 * s * head_dim, score + 4 * s, head_dim))
            if k_form > FP8:
                q_sum = np.float32(0)
                for d in range(head_dim):
                    q_sum += q_RGD[tasks[t, ROW], g, d]
                for s in range(count):
                    score_S[s] = score_S[s] * grid_4S[0, s] + q_sum * grid_4S[1, s]
            top_2[0] = top_TG[t, g]
            total, shrink = _weigh(count, score_S, top_2, total_L)
            top_TG[t, g] = top_2[0]
            sum_TG[t, g] = sum_TG[t, g] * shrink + total
            shift = np.float32(0)
            if v_form > FP8:
                for s in range(count):
                    shift += score_S[s] * grid_4S[3, s]
                    score_S[s] *= grid_4S[2, s]
            if shrink != 1 or shift != 0:
                for d in range(head_dim):
                    out_TGD[t, g, d] = out_TGD[t, g, d] * shrink + shift
            out = np.int64(out_TGD.ctypes.data) + 4 * head_dim * (group * t + g)
            _mixed(score, v, out, count, head_dim)
    if k_form > FP8:
        for g in range(group):
            top_TG[t, g] += offset_RG[tasks[t, ROW], g]


@compiled
def attend_tasks(
    counter: Any, cut_X: Any, tasks: Any, queries: Any, offset_RG: Floats, memory: Any, table: Floats, partial: Any
) -> None:
    """Parts of tasks, between neighbours of `cut_X`, as threads take them; else as that of cpu_kernels.py."""
    grid_4S = np.empty((4, _SLOTS), np.float32)
    room = (
        np.empty((2, _SLOTS, partial[0].shape[2]), np.float32),
        np.empty(_SLOTS, np.float32),
        np.empty(LANES, np.float32),
        np.empty(2, np.float32),
        grid_4S,
        grid_4S.view(np.uint32),
    )
    head_dim = queries[0].shape[2]
    address, part = np.int64(memory[0].ctypes.data), take(counter)
    while part < len(cut_X) - 1:
        first, end = cut_X[part], cut_X[part + 1]
        while first < end:
            last = first
            while last < end and not _is_served(tasks, last, head_dim):
                last += 1
            if last > first:
                cpu_kernels.attend_run(first, last, tasks, queries, offset_RG, memory, table, partial)
            if last < end:
                q_RGD = queries[1] if tasks[last, K_FORM] > FP8 else queries[0]
                _attend(tasks, last, q_RGD, offset_RG, address, memory[1], partial, room)
            first = last + 1
        part = take(counter)
