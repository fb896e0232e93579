"""Decode attention on a CPU with AVX-512: tasks of cpu_kernels.py; those with biases and fp8 codes run there.

Few queries read a slot, so lanes are channels here (pages/kernels/avx512.py): 16 slots' products are summed to one
register, slot by slot, and values are added to outputs that stay in registers. fp32 slots are read where they are;
bf16 ones, integer codes, and keys behind the last whole 16 are made fp32 first.

    T tasks   R rows (sequence, KV head)   G query heads per KV head   D head dim, whole registers   S slots of a block
    X slots of a block for each query head
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
    in_all_lanes,
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


def _emit_graded_scores(builder: Any, score: Any, scale: Any, zero: Any, count: Any, q: Any, head_dim: Any) -> None:
    """A multiple of 16 products with codes become scores: score * scale + zero * (sum of the query)."""
    score, scale, zero, q = (pointer(builder, address) for address in (score, scale, zero, q))

    def add(channel: Any, sums: Any) -> list[Any]:
        return [builder.fadd(sums[0], load(builder, at(builder, q, channel)))]

    total = in_all_lanes(builder, loop(builder, index(0), head_dim, LANES, [everywhere(0.0)], add)[0], builder.fadd)

    def grade(slot: Any, _: Any) -> list[Any]:
        place = at(builder, score, slot)
        start = builder.fmul(load(builder, at(builder, zero, slot)), total)
        store(builder, fma(builder, load(builder, place), load(builder, at(builder, scale, slot)), start), place)
        return []

    loop(builder, index(0), count, LANES, [], grade)


def _emit_weights(builder: Any, score: Any, count: Any, top: Any, total: Any) -> None:
    """e**(score - top) of a multiple of 16 scores, and their sum; `top`: where the largest of these and earlier ones
    is."""
    score, top, total = (pointer(builder, address) for address in (score, top, total))

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)  # y where x is NaN

    def compare(slot: Any, most: Any) -> list[Any]:
        return [larger(load(builder, at(builder, score, slot)), most[0])]

    most = loop(builder, index(0), count, LANES, [spread(builder, builder.load(top))], compare)[0]
    most = in_all_lanes(builder, most, larger)

    def weigh(slot: Any, sums: Any) -> list[Any]:
        place = at(builder, score, slot)
        weight = exponential(builder, builder.fsub(load(builder, place), most))
        store(builder, weight, place)
        return [builder.fadd(sums[0], weight)]

    found = loop(builder, index(0), count, LANES, [everywhere(0.0)], weigh)[0]
    _store_first(builder, most, top)
    _store_first(builder, in_all_lanes(builder, found, builder.fadd), total)


def _emit_graded_weights(builder: Any, weight: Any, scale: Any, zero: Any, count: Any, total: Any) -> None:
    """A multiple of 16 weights become those of codes: weight * scale; and the sum of weight * zero."""
    weight, scale, zero, total = (pointer(builder, address) for address in (weight, scale, zero, total))

    def grade(slot: Any, sums: Any) -> list[Any]:
        place = at(builder, weight, slot)
        mine = load(builder, place)
        store(builder, builder.fmul(mine, load(builder, at(builder, scale, slot))), place)
        return [fma(builder, mine, load(builder, at(builder, zero, slot)), sums[0])]

    found = loop(builder, index(0), count, LANES, [everywhere(0.0)], grade)[0]
    _store_first(builder, in_all_lanes(builder, found, builder.fadd), total)


def _store_first(builder: Any, row: Any, place: Any) -> None:
    builder.store(builder.extract_element(row, ir.Constant(ir.IntType(32), 0)), place)


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
_graded_scores, _graded_weights = emitted(_emit_graded_scores), emitted(_emit_graded_weights)
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
    """Where slots are as fp32, up to 16 of them; `room` for those that are not so in place."""
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


# A view of an array takes longer to make than a short task: these take addresses.


@compiled
def _read_grid(tasks: Any, t: int, code: int, first: int, count: int, halves: Any, bits_4S: Any, row: int) -> None:
    """Scales and zeros of a block, to rows `row` and the next of `bits_4S`; 0 up to a multiple of 16."""
    whole = count // LANES * LANES
    for i in range(2):
        place = tasks[t, code + 1 + i] + 2 * first
        target = np.int64(bits_4S.ctypes.data) + 4 * _SLOTS * (row + i)
        _widen((np.int64(halves.ctypes.data) + place, target, whole))
        for s in range(whole, count):
            bits_4S[row + i, s] = np.uint32(halves[place // 2 + s]) << np.uint32(16)
        if whole < count:
            for s in range(count, whole + LANES):
                bits_4S[row + i, s] = 0


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
    """Slots of a block are made fp32 16 at a time, for all queries: those stay in the nearest cache."""
    out_TGD, top_TG, sum_TG = partial
    slot_SD, score_X, found_3, bits_4S = room
    group, head_dim = q_RGD.shape[1:]
    begin, end, k_form, v_form = tasks[t, SKIP], tasks[t, LENGTH], tasks[t, K_FORM], tasks[t, V_FORM]
    q = np.int64(q_RGD.ctypes.data) + 4 * tasks[t, ROW] * group * head_dim
    out = np.int64(out_TGD.ctypes.data) + 4 * head_dim * group * t
    score, slot = np.int64(score_X.ctypes.data), np.int64(slot_SD.ctypes.data)
    grid, found = np.int64(bits_4S.ctypes.data), np.int64(found_3.ctypes.data)
    k_width, v_width = slot_width(k_form, head_dim), slot_width(v_form, head_dim)
    for g in range(group):
        top_TG[t, g], sum_TG[t, g] = -np.inf, 0
        for d in range(head_dim):
            out_TGD[t, g, d] = 0
    for first in range(begin, end, _SLOTS):
        count = min(_SLOTS, end - first)
        k = memory + tasks[t, K_CODE] + k_width * first
        v = memory + tasks[t, V_CODE] + v_width * first
        for s in range(0, count, LANES):
            num_slots = min(LANES, count - s)
            keys = _floats(k_form, k + k_width * s, num_slots, head_dim, slot, num_slots == LANES)
            for g in range(group):
                _dots((q + 4 * head_dim * g, keys, score + 4 * (_SLOTS * g + s), head_dim))
        if k_form > FP8:
            _read_grid(tasks, t, K_CODE, first, count, halves, bits_4S, 0)
        if v_form > FP8:
            _read_grid(tasks, t, V_CODE, first, count, halves, bits_4S, 2)
        whole = -(-count // LANES) * LANES
        for g in range(group):
            mine = score + 4 * _SLOTS * g
            if k_form > FP8:
                _graded_scores((mine, grid, grid + 4 * _SLOTS, whole, q + 4 * head_dim * g, head_dim))
            for s in range(_SLOTS * g + count, _SLOTS * g + whole):
                score_X[s] = -np.inf
            found_3[0] = top_TG[t, g]
            _weights((mine, whole, found, found + 4))
            shift, shrink = np.float32(0), np.float32(1)
            if found_3[0] > top_TG[t, g]:
                shrink = np.exp(top_TG[t, g] - found_3[0])
            top_TG[t, g], sum_TG[t, g] = found_3[0], sum_TG[t, g] * shrink + found_3[1]
            if v_form > FP8:
                _graded_weights((mine, grid + 8 * _SLOTS, grid + 12 * _SLOTS, whole, found + 8))
                shift = found_3[2]
            if shrink != 1 or shift != 0:
                for d in range(head_dim):
                    out_TGD[t, g, d] = out_TGD[t, g, d] * shrink + shift
        for s in range(0, count, LANES):
            num_slots = min(LANES, count - s)
            values = _floats(v_form, v + v_width * s, num_slots, head_dim, slot, True)
            for g in range(group):
                _mixed(score + 4 * (_SLOTS * g + s), values, out + 4 * head_dim * g, num_slots, head_dim)
    if k_form > FP8:
        for g in range(group):
            top_TG[t, g] += offset_RG[tasks[t, ROW], g]


@compiled
def room_of(group: int, head_dim: int) -> Any:
    """A thread's, for any number of tasks."""
    return (
        np.empty((LANES, head_dim), np.float32),
        np.empty(group * _SLOTS, np.float32),
        np.empty(3, np.float32),  # the largest score, and two sums
        np.empty((4, _SLOTS), np.uint32),  # scales and zeros, as bits
    )


@compiled
def attend_run(
    first: int,
    end: int,
    tasks: Any,
    queries: Any,
    offset_RG: Floats,
    memory: Any,
    table: Floats,
    partial: Any,
    room: Any,
) -> None:
    """Tasks first:end; else as that of cpu_kernels.py."""
    head_dim, address = queries[0].shape[2], np.int64(memory[0].ctypes.data)
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


@compiled
def attend_tasks(
    counter: Any, cut_X: Any, tasks: Any, queries: Any, offset_RG: Floats, memory: Any, table: Floats, partial: Any
) -> None:
    """Parts of tasks, between neighbours of `cut_X`, as threads take them."""
    room, part = room_of(*queries[0].shape[1:]), take(counter)
    while part < len(cut_X) - 1:
        attend_run(cut_X[part], cut_X[part + 1], tasks, queries, offset_RG, memory, table, partial, room)
        part = take(counter)
