"""Decode attention on a CPU, compiled by numba: one query per sequence over slots where they are stored.

Floats are read in place and codes are dequantised a tile at a time, so nothing is gathered, padded or copied. As on a
GPU (attend/kernels/decode.py), a *task* is a run of slots of one head, adjacent in memory (split-KV), with an output, a
largest score and a sum of its own; `merge` joins the tasks of a row. Tasks are independent, so threads share them out,
and a row comes out the same whatever stands beside it. Numba compiles on first use, for some seconds, and keeps the
result on disk.

    T tasks   R rows (sequence, KV head)   G query heads per KV head   D head dim   B sequences   H KV heads
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.pages.kernels.cpu_jit import compiled, take
from kvfold.pages.kernels.cpu_write import hadamard_sums, to_bf16

# Columns of a task. Addresses are bytes from the start of the arena, 0 for fields that a codec lacks.
ROW, LENGTH, SKIP, K_FORM, V_FORM, K_CODE, K_SCALE, K_ZERO, V_CODE, V_SCALE, V_ZERO, BIAS = range(12)
NUM_COLUMNS = 12
F32, BF16, FP8, INT8, INT4, INT2 = range(6)  # forms; keys from FP8 on are centred and rotated (codec/hadamard.py)
_TILE = 64  # slots that are decoded at once

Floats = NDArray[np.float32]


def jit(function: Any) -> Any:
    """No flag lets the compiler ignore NaN and infinity, so a broken slot shows."""
    return compiled(function, fastmath={"reassoc", "contract", "nsz", "arcp"})


@jit
def _dot(a: Floats, b: Floats) -> Any:
    total = np.float32(0)
    for i in range(len(b)):
        total += a[i] * b[i]
    return total


@jit
def slot_width(form: int, head_dim: int) -> int:
    """Bytes of a slot."""
    if form == F32:
        return 4 * head_dim
    if form == BF16:
        return 2 * head_dim
    if form == INT4:
        return head_dim // 2
    return head_dim // 4 if form == INT2 else head_dim


@jit
def _widened(halves: Any, address: int, count: int, bits: Any) -> None:
    """bf16 numbers as fp32, of which `bits` is a view."""
    source = halves[address // 2 : address // 2 + count]
    for i in range(count):
        bits[i] = np.uint32(source[i]) << np.uint32(16)


@jit
def _unpacked(form: int, code: Any, table: Floats, room: Floats) -> None:
    """Codes of a tile as floats, plane after plane: the channels that share a place in their bytes (codec/packing.py).
    A loop over all slots at once takes half the time of one for each."""
    count = len(code)
    if form == FP8:
        for i in range(count):
            room[i] = table[code[i]]
    elif form == INT8:
        for i in range(count):
            room[i] = np.float32(code[i])
    elif form == INT4:
        low, high = room[:count], room[count : 2 * count]
        for i in range(count):
            low[i] = np.float32(code[i] & np.uint8(15))
        for i in range(count):
            high[i] = np.float32(code[i] >> np.uint8(4))
    else:
        for part in range(4):
            mine, shift = room[part * count : (part + 1) * count], np.uint8(2 * part)
            for i in range(count):
                mine[i] = np.float32((code[i] >> shift) & np.uint8(3))


@jit
def _tile(form: int, place: Any, at: int, count: int, head_dim: int, memory: Any, table: Floats, room: Any) -> Any:
    """Slots from number `at` on as planes of fp32 [slot, channel], in place or in the first of `room`; of codes without
    scales and zeros, which go to the second. `place`: addresses of codes, scales and zeros."""
    raw, halves, words = memory
    scratch, grid_2S = room
    width = slot_width(form, head_dim)
    address = place[0] + at * width
    if form == F32:
        return words[address // 4 : address // 4 + count * head_dim]
    if form == BF16:
        _widened(halves, address, count * head_dim, scratch.view(np.uint32))
        return scratch[: count * head_dim]
    _widened(halves, place[1] + 2 * at, count, grid_2S[0].view(np.uint32))
    if form == FP8:
        grid_2S[1, :count] = 0
    else:
        _widened(halves, place[2] + 2 * at, count, grid_2S[1].view(np.uint32))
    _unpacked(form, raw[address : address + count * width], table, scratch)
    return scratch[: count * head_dim]


@jit
def _add_dots(q: Floats, k: Floats, count: int, score: Floats) -> None:
    """score[s] += q . k[s], four slots at a time, so that q is read a fourth as often."""
    size = len(q)
    whole = count - count % 4
    for s in range(0, whole, 4):
        first, second = k[s * size : (s + 1) * size], k[(s + 1) * size : (s + 2) * size]
        third, fourth = k[(s + 2) * size : (s + 3) * size], k[(s + 3) * size : (s + 4) * size]
        a = b = c = d = np.float32(0)
        for i in range(size):
            x = q[i]
            a, b, c, d = a + x * first[i], b + x * second[i], c + x * third[i], d + x * fourth[i]
        score[s] += a
        score[s + 1] += b
        score[s + 2] += c
        score[s + 3] += d
    for s in range(whole, count):
        score[s] += _dot(q, k[s * size : (s + 1) * size])


@jit
def _add_paired_dots(q: Floats, low: Floats, high: Floats, count: int, score: Floats) -> None:
    """score[s] += q . (low[s], high[s]): the two planes of a slot, with one sum."""
    size = len(q) // 2
    first_q, second_q = q[:size], q[size:]
    whole = count - count % 2
    for s in range(0, whole, 2):
        a_low, b_low = low[s * size : (s + 1) * size], low[(s + 1) * size : (s + 2) * size]
        a_high, b_high = high[s * size : (s + 1) * size], high[(s + 1) * size : (s + 2) * size]
        a = b = np.float32(0)
        for i in range(size):
            x, y = first_q[i], second_q[i]
            a, b = a + x * a_low[i] + y * a_high[i], b + x * b_low[i] + y * b_high[i]
        score[s] += a
        score[s + 1] += b
    for s in range(whole, count):
        mine = slice(s * size, (s + 1) * size)
        score[s] += _dot(first_q, low[mine]) + _dot(second_q, high[mine])


@jit
def exponentials(x: Floats, count: int, power: Any) -> None:
    """e^x of x <= 0, in place: 2^n by its bits and a polynomial of what is left, since libm's is a call for each.
    `power`: room for the bits."""
    for i in range(count):
        t = max(x[i], np.float32(-87)) * np.float32(1.4426950408889634)
        n = np.int32(t - np.float32(0.5))
        f = (t - np.float32(n)) * np.float32(0.6931471805599453)
        p = np.float32(1 / 5040) * f + np.float32(1 / 720)
        p = p * f + np.float32(1 / 120)
        p = p * f + np.float32(1 / 24)
        p = p * f + np.float32(1 / 6)
        p = p * f + np.float32(1 / 2)
        p = p * f + np.float32(1)
        power[i] = (n + np.int32(127)) << np.int32(23)
        x[i] = p * f + np.float32(1)
    factor = power.view(np.float32)
    for i in range(count):
        x[i] *= factor[i]


@jit
def _weights(score: Floats, count: int, top: Any, power: Any) -> Any:
    """Scores become exp(score - top); returns their sum."""
    for s in range(count):
        score[s] -= top
    exponentials(score, count, power)
    total = np.float32(0)
    for s in range(count):
        total += score[s]
    return total


@jit
def _add_values(weight: Floats, v: Floats, count: int, out: Floats) -> None:
    """Four slots at a time, so that the output is read and written a fourth as often."""
    size = len(out)
    whole = count - count % 4
    for s in range(0, whole, 4):
        a, b, c, d = weight[s], weight[s + 1], weight[s + 2], weight[s + 3]
        first = v[s * size : (s + 1) * size]
        second = v[(s + 1) * size : (s + 2) * size]
        third = v[(s + 2) * size : (s + 3) * size]
        fourth = v[(s + 3) * size : (s + 4) * size]
        for i in range(size):
            out[i] += a * first[i] + b * second[i] + c * third[i] + d * fourth[i]
    for s in range(whole, count):
        a, first = weight[s], v[s * size : (s + 1) * size]
        for i in range(size):
            out[i] += a * first[i]


@jit
def _planes(form: int) -> int:
    """Channels of a slot that share a byte."""
    if form == INT4:
        return 2
    return 4 if form == INT2 else 1


@jit
def _score_tile(form: int, q: Floats, q_sum: Any, k: Floats, grid_2S: Floats, count: int, score: Floats) -> None:
    """q.k of a tile; code * scale + zero is applied to the sums."""
    num_planes = _planes(form)
    width = len(q) // num_planes
    score[:count] = 0
    if num_planes == 2:
        _add_paired_dots(q, k[: count * width], k[count * width :], count, score)
    for p in range(num_planes if num_planes != 2 else 0):
        _add_dots(q[p * width : (p + 1) * width], k[p * count * width : (p + 1) * count * width], count, score)
    if form >= FP8:
        for s in range(count):
            score[s] = score[s] * grid_2S[0, s] + q_sum * grid_2S[1, s]


@jit
def _add_tile(form: int, weight: Floats, v: Floats, grid_2S: Floats, count: int, out: Floats) -> None:
    """out += weight.v of a tile; weights are scaled in place."""
    num_planes, shift = _planes(form), np.float32(0)
    width = len(out) // num_planes
    if form >= FP8:
        for s in range(count):
            shift += weight[s] * grid_2S[1, s]
            weight[s] *= grid_2S[0, s]
    for p in range(num_planes):
        _add_values(weight, v[p * count * width : (p + 1) * count * width], count, out[p * width : (p + 1) * width])
    if form >= FP8:
        out += shift


@jit
def attend_run(
    begin: int, end: int, tasks: Any, queries: Any, offset_RG: Floats, memory: Any, table: Floats, partial: Any
) -> None:
    """Tasks begin:end. `queries`: scaled, as they are and in the basis of codes; `memory`: the arena as bytes, 16-bit
    words and fp32; `table`: fp8 numbers by their byte; `partial`: outputs [T, G, D], largest scores and sums [T, G]."""
    q_RGD, rotated_RGD = queries
    out_TGD, top_TG, sum_TG = partial
    group, head_dim = q_RGD.shape[1:]
    k_room = np.empty(_TILE * head_dim, np.float32), np.empty((2, _TILE), np.float32)
    v_room = np.empty(_TILE * head_dim, np.float32), np.empty((2, _TILE), np.float32)
    score, power, q_sum_G = np.empty(_TILE, np.float32), np.empty(_TILE, np.int32), np.empty(group, np.float32)
    for t in range(begin, end):
        task, out_GD, top_G, sum_G = tasks[t], out_TGD[t], top_TG[t], sum_TG[t]
        row, k_form, v_form = task[ROW], task[K_FORM], task[V_FORM]
        is_coded = k_form >= FP8
        q_GD = rotated_RGD[row] if is_coded else q_RGD[row]
        if is_coded:
            for g in range(group):
                q_sum_G[g] = q_GD[g].sum()
        out_GD[:] = 0
        top_G[:] = -np.inf
        sum_G[:] = 0
        for at in range(task[SKIP], task[LENGTH], _TILE):
            count = min(_TILE, task[LENGTH] - at)
            k = _tile(k_form, task[K_CODE:V_CODE], at, count, head_dim, memory, table, k_room)
            v = _tile(v_form, task[V_CODE:BIAS], at, count, head_dim, memory, table, v_room)
            for g in range(group):
                _score_tile(k_form, q_GD[g], q_sum_G[g], k, k_room[1], count, score)
                if task[BIAS]:
                    first = task[BIAS] // 4 + at
                    score[:count] += memory[2][first : first + count]
                top, is_broken = top_G[g], False
                for s in range(count):
                    top = max(top, score[s])
                    is_broken |= score[s] != score[s]
                if is_broken:
                    sum_G[g] = np.nan
                if top > top_G[g]:
                    shrink = np.float32(np.exp(top_G[g] - top))
                    sum_G[g] *= shrink
                    out_GD[g] *= shrink
                    top_G[g] = top
                if top > -np.inf:
                    sum_G[g] += _weights(score, count, top, power)
                    _add_tile(v_form, score, v, v_room[1], count, out_GD[g])
        if is_coded:
            top_G += offset_RG[row]


@jit
def attend_tasks(
    counter: Any, cut_X: Any, tasks: Any, queries: Any, offset_RG: Floats, memory: Any, table: Floats, partial: Any
) -> None:
    """Parts of the tasks, between neighbours of `cut_X`, as threads take them; the rest as `attend_run`."""
    part = take(counter)
    while part < len(cut_X) - 1:
        attend_run(cut_X[part], cut_X[part + 1], tasks, queries, offset_RG, memory, table, partial)
        part = take(counter)


@jit
def merge(starts_R: Any, partial: Any, out_RGD: Floats, lse_RG: Floats) -> None:
    """Join tasks starts[r]:starts[r + 1] of each row by their log-sum-exp; a row has a slot at least."""
    out_TGD, top_TG, sum_TG = partial
    for r in range(len(starts_R) - 1):
        for g in range(out_RGD.shape[1]):
            top, total = np.float32(-np.inf), np.float32(0)
            for t in range(starts_R[r], starts_R[r + 1]):
                top = max(top, top_TG[t, g])
            for d in range(out_RGD.shape[2]):
                out_RGD[r, g, d] = 0
            for t in range(starts_R[r], starts_R[r + 1]):
                share = np.float32(np.exp(top_TG[t, g] - top))
                total += share * sum_TG[t, g]
                for d in range(out_RGD.shape[2]):
                    out_RGD[r, g, d] += share * out_TGD[t, g, d]
            for d in range(out_RGD.shape[2]):
                out_RGD[r, g, d] /= total
            lse_RG[r, g] = top + np.log(total)


@jit
def _write_slot(x: Floats, address: int, is_bf16: bool, memory: Any) -> None:
    if is_bf16:
        bits, halves = x.view(np.int32), memory[1][address // 2 : address // 2 + len(x)]
        for i in range(len(x)):
            halves[i] = to_bf16(bits[i])
    else:
        memory[2][address // 4 : address // 4 + len(x)] = x


@jit
def prepare_sequence(
    b: int,
    scale: float,
    coded: Any,
    queries: Any,
    offset_RG: Floats,
    new: Any,
    place_SBH: Any,
    is_bf16: bool,
    memory: Any,
) -> None:
    """Of sequence b of a step: scale its queries, rotate them if it reads codes, and write its new slots, keys and
    values [B, H * D], to `place_SBH`: byte addresses. `coded`: whether sequences read codes [B], and means of keys."""
    is_coded_B, mean_BHD = coded
    q_RGD, rotated_RGD = queries
    num_heads, head_dim = mean_BHD.shape[1:]
    x, root = np.empty(head_dim, np.float32), np.float32(1 / np.sqrt(head_dim & -head_dim))
    for h in range(num_heads):
        r = b * num_heads + h
        for g in range(q_RGD.shape[1]):
            for d in range(head_dim):
                q_RGD[r, g, d] *= np.float32(scale)
        if is_coded_B[b]:
            for g in range(q_RGD.shape[1]):
                total = np.float32(0)
                for d in range(head_dim):
                    total += q_RGD[r, g, d] * mean_BHD[b, h, d]
                    x[d] = q_RGD[r, g, d]
                offset_RG[r, g] = total
                hadamard_sums(x)  # of codec/hadamard.py
                for d in range(head_dim):
                    rotated_RGD[r, g, d] = x[d] * root
        for side in range(2):
            _write_slot(new[side][b, h * head_dim : (h + 1) * head_dim], place_SBH[side, b, h], is_bf16, memory)


@jit
def prepare(
    scale: float, coded: Any, queries: Any, offset_RG: Floats, new: Any, place_SBH: Any, is_bf16: bool, memory: Any
) -> None:
    """`prepare_sequence` of all."""
    for b in range(len(coded[0])):
        prepare_sequence(b, scale, coded, queries, offset_RG, new, place_SBH, is_bf16, memory)
