"""Second stage of split-KV decode: merge the tasks of a row with its open block, and append the new slots.

One program per row, query and stretch of channels, on plain arithmetic: what it reads is small, so its time is the
latency of its loads. Those of the first tiles, mostly the only ones, are sent off before any is used. Every program of
a row computes its scores anew, from all channels. Parts merge exactly by their log-sum-exps; a row without tasks and
with an empty open block sees its new token alone. New slots are attended to as they come, rounded to the cache's dtype,
so no program waits for what another stores.

    R rows (lane B, KV head H)   X queries of a row, index g * T + t   T new tokens   D head dim   N slots of a tile
    E channels of a program
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.decode import LOG2E
from kvfold.attend.kernels.formats import float_dtype
from kvfold.attend.kernels.pdl import begins_early, launch_options, wait_for_earlier

_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(0.6931471805599453)
_SLOTS = 32  # slots of the open block at a time


class Shape(NamedTuple):
    """How a merge is laid out on the chip."""

    channels: int  # of a program
    parts: int  # tasks merged at a time
    warps: int


@triton.jit
def merge_kernel(
    parts: tl.tensor, part_lses: tl.tensor, task_range: tl.tensor, q: tl.tensor,
    k_new: tl.tensor, k_lane: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v_new: tl.tensor, v_lane: tl.tensor, v_head: tl.tensor, v_token: tl.tensor,
    memory: tl.tensor, open_address: tl.tensor, fills: tl.tensor, result: tl.tensor, lse: tl.tensor,
    scale_log2: tl.tensor, open_len: tl.tensor, sink_address: tl.tensor, sink_fills: tl.tensor, num_heads: tl.tensor,
    X: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, SINKS: tl.constexpr, SINK_SLOTS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1)
    lane, head = row // num_heads, row % num_heads
    d = tl.arange(0, DP)
    e = tl.program_id(2) * E + tl.arange(0, E)  # the channels whose values this program adds up
    t = tl.arange(0, TP)
    fill = tl.load(fills + lane)
    first, last = tl.load(task_range + row * 2), tl.load(task_range + row * 2 + 1)
    ITEM: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 // ITEM if D * ITEM % 16 == 0 else 1  # said aloud, or loads go one by one
    block = head * open_len * D
    k_open = memory + tl.multiple_of(tl.load(open_address + lane * 2) // ITEM + block, ALIGNED)
    v_open = memory + tl.multiple_of(tl.load(open_address + lane * 2 + 1) // ITEM + block, ALIGNED)
    k_old, v_old = _old(k_open, 0, fill, d, D, SLOTS), _old(v_open, 0, fill, e, D, SLOTS)
    wait_for_earlier(EARLY)
    k_new += lane * k_lane + head * k_head + t[:, None] * k_token
    v_new += lane * v_lane + head * v_head + t[:, None] * v_token
    k = tl.load(k_new + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(v_new + e[None, :], mask=(t < T)[:, None] & (e < D)[None, :], other=0.0)
    k, v = k.to(memory.dtype.element_ty), v.to(memory.dtype.element_ty)
    query = tl.load(q + (row * X + x) * D + d, mask=d < D, other=0.0).to(tl.float32) * scale_log2
    result += (row * X + x) * D + e
    lse += row * X + x
    is_first = tl.program_id(2) == 0
    if fill < 0:  # a lane without a sequence
        tl.store(result, tl.zeros([E], result.dtype.element_ty), mask=e < D)
        if is_first:
            tl.store(lse, float("-inf"))
        return
    part_score, part = _part(parts, part_lses, first, last, x, e, X, D, PARTS)

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

    top, total, acc = _with_old(top, total, acc, query, k_old, v_old, 0, fill, SLOTS)
    for start in range(SLOTS, fill, SLOTS):
        k_old, v_old = _old(k_open, start, fill, d, D, SLOTS), _old(v_open, start, fill, e, D, SLOTS)
        top, total, acc = _with_old(top, total, acc, query, k_old, v_old, start, fill, SLOTS)

    if SINKS > 0:
        count = tl.load(sink_fills + lane)
        block = head * SINKS * D
        k_sinks = memory + tl.multiple_of(tl.load(sink_address + lane * 2) // ITEM + block, ALIGNED)
        v_sinks = memory + tl.multiple_of(tl.load(sink_address + lane * 2 + 1) // ITEM + block, ALIGNED)
        k_old, v_old = _old(k_sinks, 0, count, d, D, SINK_SLOTS), _old(v_sinks, 0, count, e, D, SINK_SLOTS)
        top, total, acc = _with_old(top, total, acc, query, k_old, v_old, 0, count, SINK_SLOTS)

    top, total, acc = _merged(top, total, acc, part_score, part)
    for start in range(first + PARTS, last, PARTS):
        part_score, part = _part(parts, part_lses, start, last, x, e, X, D, PARTS)
        top, total, acc = _merged(top, total, acc, part_score, part)

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
def _with_old(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, query: tl.tensor, k_old: tl.tensor, v_old: tl.tensor,
    start: tl.tensor, fill: tl.tensor,
    SLOTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Attend to a tile of the open block that begins at slot `start`."""
    score = tl.sum(k_old.to(tl.float32) * query[None, :], 1)
    score = tl.where(start + tl.arange(0, SLOTS) < fill, score, float("-inf"))
    return _merged(top, total, acc, score, v_old.to(tl.float32))


@triton.jit
def _part(
    parts: tl.tensor, part_lses: tl.tensor, start: tl.tensor, last: tl.tensor, x: tl.tensor, e: tl.tensor,
    X: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
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
    out: Tensor, lse: Tensor, task_range: Tensor, q_RXD: Tensor, k_new_BHTD: Tensor, v_new_BHTD: Tensor,
    memory: Tensor, open_address: Tensor, fill: Tensor, open_len: int,
    sink_address: Tensor, sink_fill: Tensor, sink_len: int, kv_dtype: str, scale: float, shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator `merge_rows`."""
    num_rows, num_queries, head_dim = q_RXD.shape
    num_new = k_new_BHTD.shape[2]
    k_new_BHTD, v_new_BHTD = _with_dense_channels(k_new_BHTD), _with_dense_channels(v_new_BHTD)
    result = torch.empty_like(q_RXD, memory_format=torch.contiguous_format)
    result_lse = torch.empty(num_rows, num_queries, dtype=torch.float32, device=q_RXD.device)
    shape = shape or choose_shape(num_rows * num_queries, len(out) // len(fill), triton.next_power_of_2(head_dim))
    early = begins_early(memory)
    merge_kernel[(num_rows, num_queries, triton.cdiv(head_dim, shape.channels))](
        out, lse, task_range.contiguous(), q_RXD.contiguous(),
        k_new_BHTD, *k_new_BHTD.stride()[:3],
        v_new_BHTD, *v_new_BHTD.stride()[:3],
        memory.view(float_dtype(kv_dtype)), open_address, fill, result, result_lse,
        scale * LOG2E, open_len, sink_address, sink_fill, num_rows // len(fill),
        X=num_queries, T=num_new, TP=triton.next_power_of_2(num_new),
        D=head_dim, DP=triton.next_power_of_2(head_dim), E=shape.channels,
        PARTS=shape.parts, SLOTS=_SLOTS, SINKS=sink_len, SINK_SLOTS=triton.next_power_of_2(max(sink_len, 1)),
        EARLY=early, num_warps=shape.warps, **launch_options(early),
    )  # fmt: skip
    return result, result_lse


def _with_dense_channels(x_BHTD: Tensor) -> Tensor:
    """Rows may lie apart, as views of a larger product do."""
    return x_BHTD if x_BHTD.stride(3) == 1 else x_BHTD.contiguous()


def choose_shape(num_outputs: int, lane_tasks: int, head_dim: int) -> Shape:
    """Few outputs are cut by channels and take a head's tasks at once; the more there are, the less each one works on.

    The steps were measured on an H200 with 32, 128, 512 and 2048 outputs of 128 channels.
    """
    if num_outputs >= 1024:
        return Shape(min(128, head_dim), 16, 1)
    if num_outputs >= 256:
        return Shape(min(64, head_dim), 32, 1)
    if num_outputs >= 96:
        return Shape(min(64, head_dim), 64, 2)
    half = 1 << (lane_tasks // 2).bit_length()  # a head may have half of its lane's tasks
    return Shape(min(32, head_dim), min(256, max(16, half)), 4)
