"""The second stage of a decode step: merge the tasks of a row with its open block, and append the new slots.

One program per row, query and stretch of channels, on plain arithmetic: what it reads is small, so its time is the
latency of its loads. They are sent off before any is used, and many at once: the longest head has several times the
tasks of the others. Every program of a row computes its scores anew, from all channels. Parts merge exactly by their
log-sum-exps; a row without tasks and with an empty open block sees its new token alone. New slots are attended to as
they come, rounded to the cache's dtype, so no program waits for what another stores.

    R rows (sequence, KV head)   X queries of a row, index g * T + t   T new tokens   D head dim   N slots of a tile
    E channels of a program
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.decode import LOG2E
from kvfold.attend.kernels.formats import float_dtype

_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(0.6931471805599453)
_PARTS = 256  # tasks merged at a time, at most
_SLOTS = 32  # slots of the open block at a time
_CHANNELS = 32  # of a program


@triton.jit
def merge_kernel(
    parts: tl.tensor,
    part_lses: tl.tensor,
    task_range: tl.tensor,
    q: tl.tensor,
    k_new: tl.tensor,
    v_new: tl.tensor,
    memory: tl.tensor,
    open_address: tl.tensor,
    fills: tl.tensor,
    result: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    open_len: tl.tensor,
    num_heads: tl.tensor,
    X: tl.constexpr,
    T: tl.constexpr,
    TP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1)
    lane = row // num_heads
    d = tl.arange(0, DP)
    e = tl.program_id(2) * E + tl.arange(0, E)  # the channels whose values this program adds up
    t = tl.arange(0, TP)
    fill = tl.load(fills + lane)
    first, last = tl.load(task_range + row * 2), tl.load(task_range + row * 2 + 1)
    new = (row * T + t)[:, None] * D
    k = tl.load(k_new + new + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(v_new + new + e[None, :], mask=(t < T)[:, None] & (e < D)[None, :], other=0.0)
    k, v = k.to(memory.dtype.element_ty), v.to(memory.dtype.element_ty)
    query = tl.load(q + (row * X + x) * D + d, mask=d < D, other=0.0).to(tl.float32) * scale_log2
    ITEM: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
    block = ((row % num_heads) * open_len) * D
    k_open = memory + tl.load(open_address + lane * 2) // ITEM + block
    v_open = memory + tl.load(open_address + lane * 2 + 1) // ITEM + block
    result += (row * X + x) * D + e
    lse += row * X + x
    is_first = tl.program_id(2) == 0
    if fill < 0:  # a lane without a sequence
        tl.store(result, tl.zeros([E], result.dtype.element_ty), mask=e < D)
        if is_first:
            tl.store(lse, float("-inf"))
        return
    part_score, part = _part(parts, part_lses, first, last, x, e, X, D, PARTS)
    k_old = _old(k_open, 0, fill, d, D, SLOTS)
    v_old = _old(v_open, 0, fill, e, D, SLOTS)

    # The queries of the first head store the new slots, one each; what pads a draft may lie past the block's end.
    own = (t < T) & (t == x) & (fill + t < open_len)
    to = (fill + t)[:, None] * D
    if is_first:
        tl.store(k_open + to + d[None, :], k, mask=own[:, None] & (d < D)[None, :])
    tl.store(v_open + to + e[None, :], v, mask=own[:, None] & (e < D)[None, :])
    new_score = tl.where(t <= x % T, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
    top = tl.max(new_score, 0)
    weight = tl.exp2(new_score - top)
    total = tl.sum(weight, 0)
    acc = tl.sum(weight[:, None] * v.to(tl.float32), 0)

    for start in range(0, fill, SLOTS):
        next_k = _old(k_open, start + SLOTS, fill, d, D, SLOTS)
        next_v = _old(v_open, start + SLOTS, fill, e, D, SLOTS)
        score = tl.sum(k_old.to(tl.float32) * query[None, :], 1)
        score = tl.where(start + tl.arange(0, SLOTS) < fill, score, float("-inf"))
        top, total, acc = _merged(top, total, acc, score, v_old.to(tl.float32))
        k_old, v_old = next_k, next_v

    for start in range(first, last, PARTS):
        next_score, next_part = _part(parts, part_lses, start + PARTS, last, x, e, X, D, PARTS)
        top, total, acc = _merged(top, total, acc, part_score, part)
        part_score, part = next_score, next_part

    tl.store(result, (acc / total).to(result.dtype.element_ty), mask=e < D)
    if is_first:
        tl.store(lse, (top + tl.log2(total)) * _LN2)


@triton.jit
def _old(
    side: tl.tensor, start: tl.tensor, fill: tl.tensor, c: tl.tensor, D: tl.constexpr, SLOTS: tl.constexpr
) -> tl.tensor:
    """Channels c of the open block's slots from `start` on."""
    n = start + tl.arange(0, SLOTS)
    return tl.load(side + n[:, None] * D + c[None, :], mask=(n < fill)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _part(
    parts: tl.tensor,
    part_lses: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    x: tl.tensor,
    e: tl.tensor,
    X: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Log-sum-exps in base 2 [N] and outputs [N, E] of the tasks from `start` on."""
    i = start + tl.arange(0, PARTS)
    score = tl.load(part_lses + i * X + x, mask=i < last, other=float("-inf")) * _LOG2E
    at = (i.to(tl.int64) * X + x)[:, None] * D + e[None, :]
    return score, tl.load(parts + at, mask=(i < last)[:, None] & (e < D)[None, :], other=0.0)


@triton.jit
def _merged(top: tl.tensor, total: tl.tensor, acc: tl.tensor, score: tl.tensor, value: tl.tensor) -> tl.tuple:
    """Add rows of `value` with scores in base 2; `top` is finite from the start, so nothing becomes NaN."""
    new_top = tl.maximum(top, tl.max(score, 0))
    keep = tl.exp2(top - new_top)
    p = tl.exp2(score - new_top)
    return new_top, total * keep + tl.sum(p, 0), acc * keep + tl.sum(p[:, None] * value, 0)


def launch(
    out: Tensor,
    lse: Tensor,
    task_range: Tensor,
    q_RXD: Tensor,
    k_new_RTD: Tensor,
    v_new_RTD: Tensor,
    memory: Tensor,
    open_address: Tensor,
    fill: Tensor,
    open_len: int,
    kv_dtype: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention [R, X, D] in q's dtype over everything a row stores, and its log-sum-exp fp32 [R, X]."""
    num_rows, num_queries, head_dim = q_RXD.shape
    num_new = k_new_RTD.shape[1]
    result = torch.empty_like(q_RXD, memory_format=torch.contiguous_format)
    result_lse = torch.empty(num_rows, num_queries, dtype=torch.float32, device=q_RXD.device)
    channels = min(_CHANNELS, triton.next_power_of_2(head_dim))
    merge_kernel[(num_rows, num_queries, triton.cdiv(head_dim, channels))](
        out,
        lse,
        task_range.contiguous(),
        q_RXD.contiguous(),
        k_new_RTD.contiguous(),
        v_new_RTD.contiguous(),
        memory.view(float_dtype(kv_dtype)),
        open_address,
        fill,
        result,
        result_lse,
        scale * LOG2E,
        open_len,
        num_rows // len(fill),
        X=num_queries,
        T=num_new,
        TP=triton.next_power_of_2(num_new),
        D=head_dim,
        DP=triton.next_power_of_2(head_dim),
        E=channels,
        PARTS=_parts(len(out) // len(fill)),
        SLOTS=_SLOTS,
        num_warps=4,
    )
    return result, result_lse


def _parts(lane_tasks: int) -> int:
    """Tasks at a time: those of a head that has half of its lane's."""
    return min(_PARTS, max(16, 1 << (lane_tasks // 2).bit_length()))
