"""Decoder layers for few rows on a CPU with AVX-512, each in two calls, or all layers of a decode step in one.

Python between matrix products, and the threads that it wakes for each, take a quarter of a step of 16 replies. Here
threads go through phases (pages/kernels/cpu_jit.py), whose parts are outputs of a product or sequences. Norms and the
layout of rows take microseconds, so every thread that has a part computes them itself.

`room` is a Room (cpu_decoder.py), `state` an AttentionState (passes/cpu_step.py). Of bf16 models, products, rotated
queries and keys, and sums are rounded where prompts of many rows round them (cpu_rows.py): few rows say the same.

    L layers   N rows, a multiple of 16   X outputs of a product   M hidden dims   K dims of the MLP   B sequences
    R rows of attention (sequence, KV head)   G query heads per KV head   D head dim   P phases   C columns of a layer
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from kvfold.attend.amx_layout import SLOTS
from kvfold.attend.avx512_decode import attend_run, room_of
from kvfold.attend.cpu_kernels import Floats, merge, prepare_sequence
from kvfold.core import has_amx_kernels
from kvfold.models.avx512_gemm import pack_rows, products
from kvfold.models.cpu_kernels import add_norm, rms_norm, rotate, round_bf16, swiglu, widen
from kvfold.pages.kernels.avx512 import LANES, OUTPUTS, at, emitted, gated, index, load, loop, pointer, store
from kvfold.pages.kernels.cpu_jit import address_of, compiled, done, floats_on_line, pointer_to, take, wait

if has_amx_kernels():
    from kvfold.attend.amx_attention import attend_blocks as _attend_shared
    from kvfold.models.amx_gemm import OUTPUTS as _BF16_OUTPUTS
    from kvfold.models.amx_gemm import pack_rows as _pack_bf16
    from kvfold.models.amx_gemm import products as _bf16_products
else:  # and nobody has bf16 weights multiplied; LLVM could not compile them
    _BF16_OUTPUTS, _pack_bf16, _bf16_products = OUTPUTS, pack_rows, products

    @compiled
    def _attend_shared(*_: Any) -> None:
        pass


# Columns of a layer: addresses of weights, and of biases or 0
BEFORE, Q, K, V, Q_BIAS, K_BIAS, V_BIAS, OUT, AFTER, GATE, UP, DOWN = range(12)
NUM_PHASES = 7  # of a layer: QKV, new slots, attention, merging, output, gate and up, down; then 2 of shared slots
_QKV, _NEW, _READ, _MERGE, _OUT, _GATED, _DOWN = range(NUM_PHASES)
_PART = 64  # outputs
_SHARED_PANELS = 2  # of rows, that tiles of attention take at once


def _inlined(function: Any) -> Any:
    """Part of the kernels that call it, and not a function of its own, which LLVM would optimise once more."""
    return compiled(function, inline="always")


@compiled
def _row(address: int, size: int, is_bf16: bool) -> Any:
    """Of a norm or a bias."""
    if is_bf16:
        found = np.empty(size, np.float32)
        widen(carray(pointer_to(address), (size,), np.uint16), found)
        return found
    return carray(pointer_to(address), (size,), np.float32)


@compiled
def _packed(x_NX: Any, is_bf16: bool) -> Any:
    rows = np.empty(LANES, np.int64)
    found = floats_on_line(x_NX.size // 2 if is_bf16 else x_NX.size)
    if is_bf16:
        _pack_bf16(x_NX.ctypes.data, *x_NX.shape, found, rows)
    else:
        pack_rows(x_NX.ctypes.data, *x_NX.shape, found, rows)
    return found


@_inlined
def _num_parts(num_outputs: int) -> int:
    return -(-num_outputs // _PART)


@compiled
def _multiply(
    x_X: Floats, size: int, weight: int, y_NX: Floats, part: int, is_bf16: bool, rounds: bool = True
) -> tuple[int, int]:
    """A part of the outputs, which is returned. `rounds`: to bf16, or they are with their biases."""
    num_outputs = y_NX.shape[1]
    begin, end = _PART * part, min(_PART * (part + 1), num_outputs)
    if is_bf16:
        w_OX = carray(pointer_to(weight), (num_outputs, size), np.uint16)
        _bf16_products(x_X, w_OX, y_NX, begin // _BF16_OUTPUTS, -(-end // _BF16_OUTPUTS))
        if rounds:
            round_bf16(y_NX, begin, end)
    else:
        products(
            x_X,
            carray(pointer_to(weight), (num_outputs, size), np.float32),
            y_NX,
            begin // OUTPUTS,
            -(-end // OUTPUTS),
        )
    return begin, end


@compiled
def qkv(phase: Any, layer_C: Any, epsilon: float, room: Any) -> None:
    """Queries, keys and values without biases: products of the norm of x."""
    x_NM = room.x_NM
    num_q, num_kv = _num_parts(room.q_NX.shape[1]), _num_parts(room.k_NX.shape[1])
    part = take(phase)
    if part < num_q + 2 * num_kv:
        size, y_NM = x_NM.shape[1], np.empty_like(x_NM)
        rms_norm(x_NM, y_NM, _row(layer_C[BEFORE], size, room.is_bf16), epsilon)
        y_X = _packed(y_NM, room.is_bf16)
        while part < num_q + 2 * num_kv:
            if part < num_q:
                _multiply(y_X, size, layer_C[Q], room.q_NX, part, room.is_bf16, False)
            elif part < num_q + num_kv:
                _multiply(y_X, size, layer_C[K], room.k_NX, part - num_q, room.is_bf16, False)
            else:
                _multiply(y_X, size, layer_C[V], room.v_NX, part - num_q - num_kv, room.is_bf16, False)
            done(phase)
            part = take(phase)
    wait(phase, num_q + 2 * num_kv)


def _emit_swiglu(builder: Any, gate: Any, up: Any, count: Any) -> None:
    """silu(gate) * up of a multiple of 32 numbers, in place of the gate, as of many rows."""
    gate, up = pointer(builder, gate), pointer(builder, up)

    def put(i: Any, _: Any) -> list[Any]:
        places = [at(builder, gate, builder.add(i, index(half))) for half in (0, LANES)]
        ups = [load(builder, at(builder, up, builder.add(i, index(half)))) for half in (0, LANES)]
        found = gated(builder, [load(builder, place) for place in places], ups)
        for row, place in zip(found, places, strict=True):
            store(builder, row, place)
        return []

    loop(builder, index(0), count, 2 * LANES, [], put)


_swiglu_of_row = emitted(_emit_swiglu)


@compiled
def _swiglu_bf16(gate_NK: Floats, up_NK: Floats, begin: int, end: int) -> None:
    for n in range(len(gate_NK)):
        _swiglu_of_row((address_of(gate_NK[n, begin:end]), address_of(up_NK[n, begin:end]), end - begin))


@_inlined
def _output(phase: Any, layer_C: Any, room: Any) -> None:
    attended_NX, out_NM = room.attended_NX, room.out_NM
    num_parts, part = _num_parts(out_NM.shape[1]), take(phase)
    if part < num_parts:
        x_X = _packed(attended_NX, room.is_bf16)
        while part < num_parts:
            _multiply(x_X, attended_NX.shape[1], layer_C[OUT], out_NM, part, room.is_bf16)
            done(phase)
            part = take(phase)
    wait(phase, num_parts)


@_inlined
def _gated(phase: Any, layer_C: Any, epsilon: float, room: Any) -> None:
    """The sum of x and the output projection, and SwiGLU of its norm in place of the gate."""
    x_NM, gate_NK, up_NK = room.x_NM, room.gate_NK, room.up_NK
    num_parts, part = _num_parts(gate_NK.shape[1]), take(phase)
    if part < num_parts:
        size, both_NM, y_NM = x_NM.shape[1], np.empty_like(x_NM), np.empty_like(x_NM)
        add_norm(x_NM, room.out_NM, both_NM, y_NM, _row(layer_C[AFTER], size, room.is_bf16), epsilon)
        y_X = _packed(y_NM, room.is_bf16)
        if part == 0:
            room.sum_NM[:] = both_NM
            if room.is_bf16:
                round_bf16(room.sum_NM, 0, size)
        while part < num_parts:
            begin, end = _multiply(y_X, size, layer_C[GATE], gate_NK, part, room.is_bf16)
            _multiply(y_X, size, layer_C[UP], up_NK, part, room.is_bf16)
            if room.is_bf16:
                _swiglu_bf16(gate_NK, up_NK, begin, end)
            else:
                swiglu(gate_NK, up_NK, begin, end)
            done(phase)
            part = take(phase)
    wait(phase, num_parts)


@_inlined
def _down(phase: Any, layer_C: Any, room: Any) -> None:
    """x becomes the layer's output."""
    x_NM, sum_NM, gate_NK = room.x_NM, room.sum_NM, room.gate_NK
    num_parts, part = _num_parts(x_NM.shape[1]), take(phase)
    if part < num_parts:
        y_X = _packed(gate_NK, room.is_bf16)
        while part < num_parts:
            begin, end = _multiply(y_X, gate_NK.shape[1], layer_C[DOWN], x_NM, part, room.is_bf16)
            for n in range(len(x_NM)):
                y, more = x_NM[n, begin:end], sum_NM[n, begin:end]
                for i in range(len(y)):
                    y[i] += more[i]
            if room.is_bf16:
                round_bf16(x_NM, begin, end)
            done(phase)
            part = take(phase)
    wait(phase, num_parts)


@compiled
def mlp(phase_PX: Any, layer_C: Any, epsilon: float, room: Any) -> None:
    """The output projection and the MLP, with what is added before and after. Outputs are whole blocks."""
    _output(phase_PX[_OUT], layer_C, room)
    _gated(phase_PX[_GATED], layer_C, epsilon, room)
    _down(phase_PX[_DOWN], layer_C, room)


@_inlined
def _add_bias(y_X: Floats, address: int, is_bf16: bool) -> None:
    if address != 0:
        y_X += _row(address, len(y_X), is_bf16)


@compiled
def turn_row(n: int, layer_C: Any, room: Any, angles: Any) -> None:
    """Queries, keys and values of a row with their biases; queries and keys rotated."""
    mine, biases = slice(n, n + 1), (layer_C[Q_BIAS], layer_C[K_BIAS], layer_C[V_BIAS])
    for i, x_NX in enumerate((room.q_NX, room.k_NX, room.v_NX)):
        _add_bias(x_NX[n], biases[i], room.is_bf16)
        if room.is_bf16:
            round_bf16(x_NX[mine], 0, x_NX.shape[1])
    for x_NX in (room.q_NX, room.k_NX):
        rotate(x_NX[mine], angles[0][mine], angles[1][mine])
        if room.is_bf16:
            round_bf16(x_NX[mine], 0, x_NX.shape[1])


@compiled
def _read_shared(phase_PX: Any, layer: int, num_heads: int, shape: Any, state: Any) -> None:
    """Of each group of sequences the slots that they share, at once."""
    shared, (_, group, head_dim) = state.shared, shape
    scale, width = np.array([state.scale_L[layer]], dtype=np.float32), num_heads * group * head_dim
    between = [group * head_dim, head_dim, width]
    strides = np.array(between + between + [head_dim, head_dim])
    for n in range(len(shared.first_N) - 1):
        first, end, num_slots = shared.first_N[n], shared.first_N[n + 1], shared.slots_LN[layer, n]
        num_rows, num_blocks = (end - first) * group, -(-num_slots // SLOTS)
        size, start = num_heads * num_blocks * SLOTS * head_dim, first * num_heads * group
        k_HBSD = shared.room_2X[0, :size].reshape(num_heads, num_blocks, SLOTS, head_dim)
        v_HBDS = shared.room_2X[1, :size].reshape(num_heads, num_blocks, head_dim, SLOTS)
        lse_HR = shared.lse_X[start : start + num_heads * num_rows].reshape(num_heads, num_rows)
        addresses = np.array([address_of(shared.q_bX[first:]), address_of(shared.out_bX[first:])])
        place_3X = np.array([[0, end - first], [0, num_blocks], [num_slots, 0]])
        numbers, mine_PX = (num_heads, group, 0, 0, head_dim, _SHARED_PANELS), phase_PX[2 * n : 2 * n + 2]
        parts = shared.part_LNHP4[layer, n : n + 1]
        _attend_shared(addresses, strides, parts, place_3X, numbers, scale, lse_HR, k_HBSD, v_HBDS, mine_PX)
        wait(mine_PX[1], num_heads * -(-num_rows // (_SHARED_PANELS * LANES)))


@compiled
def _join_shared(shared: Any, row: int, out_HGD: Floats, lse_HG: Floats) -> None:
    """What a sequence found in its own slots with what it found in those that it shares, by log-sum-exps."""
    n = 0
    while shared.first_N[n + 1] <= row:
        n += 1
    num_heads, group, head_dim = out_HGD.shape
    first, num_rows = shared.first_N[n], (shared.first_N[n + 1] - shared.first_N[n]) * group
    for h in range(num_heads):
        for g in range(group):
            other = shared.lse_X[first * num_heads * group + h * num_rows + (row - first) * group + g]
            most = max(other, lse_HG[h, g])
            own, its = np.exp(lse_HG[h, g] - most), np.exp(other - most)
            total = own + its
            found = shared.out_bX[row, (h * group + g) * head_dim : (h * group + g + 1) * head_dim]
            for d in range(head_dim):
                out_HGD[h, g, d] = (own * out_HGD[h, g, d] + its * found[d]) / total
            lse_HG[h, g] = most + np.log(total)


@_inlined
def _attention(phase_PX: Any, layer: int, layer_C: Any, room: Any, angles: Any, state: Any) -> None:
    """Of one new token of each sequence; its keys and values go to the open blocks."""
    q_NX, k_NX, v_NX = room.q_NX, room.k_NX, room.v_NX
    coded, memory = (state.is_coded_LB[layer], state.mean_LBHD[layer]), state.memory
    num_sequences, num_heads = coded[1].shape[:2]
    offset_RG, shape = state.offset_RG, state.rotated_RGD.shape
    queries = q_NX[:num_sequences].reshape(shape), state.rotated_RGD
    phase, part = phase_PX[_NEW], take(phase_PX[_NEW])
    while part < num_sequences:
        turn_row(part, layer_C, room, angles)
        if state.shared.row_B[part] >= 0:
            state.shared.q_bX[state.shared.row_B[part]] = q_NX[part]
        new, place_SBH = (k_NX, v_NX), state.place_LSBH[layer]
        prepare_sequence(part, state.scale_L[layer], coded, queries, offset_RG, new, place_SBH, state.is_bf16, memory)
        done(phase)
        part = take(phase)
    wait(phase, num_sequences)
    tasks = state.task_NC[state.first_L[layer] : state.first_L[layer + 1]]
    phase, cut_X = phase_PX[_READ], state.cut_LX[layer]
    num_parts, part = len(cut_X) - 1, take(phase)
    if part < num_parts:
        scratch = room_of(shape[1], shape[2])
        while part < num_parts:
            attend_run(
                cut_X[part], cut_X[part + 1], tasks, queries, offset_RG, memory, state.table, state.partial, scratch
            )
            done(phase)
            part = take(phase)
    wait(phase, num_parts)
    _read_shared(phase_PX[NUM_PHASES:], layer, num_heads, shape, state)
    phase, part = phase_PX[_MERGE], take(phase_PX[_MERGE])
    out_RGD, start_X = room.attended_NX[:num_sequences].reshape(shape), state.start_LX[layer]
    while part < num_sequences:
        first, last = part * num_heads, (part + 1) * num_heads
        merge(start_X[first : last + 1], state.partial, out_RGD[first:last], state.lse_RG[first:last])
        if state.shared.row_B[part] >= 0:
            _join_shared(state.shared, state.shared.row_B[part], out_RGD[first:last], state.lse_RG[first:last])
        done(phase)
        part = take(phase)
    wait(phase, num_sequences)


@compiled
def step(phase_PX: Any, layer_LC: Any, epsilon_L2: Any, room: Any, angles: Any, state: Any) -> None:
    """All layers of a decode step; x becomes the output of the last."""
    num_phases = len(phase_PX) // len(layer_LC)
    for layer in range(len(layer_LC)):
        mine_PX = phase_PX[num_phases * layer : num_phases * (layer + 1)]
        qkv(mine_PX[_QKV], layer_LC[layer], epsilon_L2[layer, 0], room)
        _attention(mine_PX, layer, layer_LC[layer], room, angles, state)
        mlp(mine_PX, layer_LC[layer], epsilon_L2[layer, 1], room)
