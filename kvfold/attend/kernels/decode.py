"""Paged split-KV decode attention over quantised pages, with GQA (FlashDecoding, first stage): one program per task.

FlashDecoding's split over storage: a task is a stretch of slots of one head that lie adjacent, so each field is one
dense array and loads need no table. Softmax runs online over tiles in base 2, log2(e) folded into the scale; only the
last tile is masked. The grid is as large as the table, or as the order in which tasks begin, and never changes; tasks
of length 0 end at once.

    R rows of queries   X queries of a row   D head dim   N slots of a tile   M queries (X padded)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.formats import NUM_COLUMNS, Format, format_of, padded
from kvfold.attend.kernels.pdl import begins_early, launch_options, let_next_begin, wait_for_earlier
from kvfold.attend.kernels.tile import (
    add_values,
    elements,
    key_scores,
    load_each,
    load_metadata,
    no_values,
    query_parts,
    side_pointers,
    store_values,
)

LOG2E = 1.4426950408889634
_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(0.6931471805599453)


class Config(NamedTuple):
    """How a kernel is compiled: slots of a tile, warps, tiles in flight, and a limit that lets more programs share a
    processor."""

    block: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# By the bits of the wider side, for head dims up to 128; wider heads take half the slots. The limits let as many tasks
# run at once as there are for a processor (passes/captured/split_kv.py): one more is waited for as long as all others.
_CONFIG: dict[int, Config] = {
    32: Config(32, 4, 2),
    16: Config(32, 1, 4),
    8: Config(64, 4, 3, 128),
    4: Config(64, 2, 3, 128),
    2: Config(64, 1, 3),
}


@triton.jit
def attend_kernel(
    q: tl.tensor, offset: tl.tensor,
    k_memory: tl.tensor, v_memory: tl.tensor, meta: tl.tensor, biases: tl.tensor,
    tasks: tl.tensor, order: tl.tensor, out: tl.tensor, lse: tl.tensor, scale_log2: tl.tensor,
    X: tl.constexpr, M: tl.constexpr, NUM_COLUMNS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    nth = tl.program_id(0)
    if HAS_ORDER:
        nth = tl.load(order + nth)
    task = tasks + nth.to(tl.int64) * NUM_COLUMNS
    # All loads are issued at once, before the program knows whether it has a task.
    length = tl.load(task + 1).to(tl.int32)
    row = tl.load(task)
    k, v = side_pointers(k_memory, meta, task + 2), side_pointers(v_memory, meta, task + 5)
    bias = biases + elements(tl.load(task + 8), biases.dtype.element_ty)
    skip = tl.load(task + 10).to(tl.int32) if HAS_SKIP else 0
    wait_for_earlier(EARLY)
    let_next_begin(EARLY)
    if length == 0:
        return

    D: tl.constexpr = K.head_dim
    x = tl.arange(0, M)
    parts, sum_q = query_parts(q + row * X * D, X, M, K)
    lift = tl.zeros([M], tl.float32)
    if HAS_OFFSET:
        lift = tl.load(offset + row * X + x, mask=x < X, other=0.0).to(tl.float32) * scale_log2
    top = tl.full([M], float("-inf"), tl.float32)
    # Sums over slots stay spread over a tile until the end: a reduction across threads costs more than the registers.
    total = tl.zeros([BLOCK, M], tl.float32)
    even = tl.zeros([BLOCK, M], tl.float32)
    acc = no_values(M, V)
    # Metadata are fetched a tile ahead: the compiler does so for codes, whose loads feed dots, but not for these.
    first = tl.arange(0, BLOCK)
    k_meta, v_meta = load_metadata(k, first, length, K), load_metadata(v, first, length, V)
    full = length // BLOCK * BLOCK
    for MASKED in tl.static_range(2):  # whole tiles, then what is left of one
        for at in tl.range(
            full if MASKED else 0, length if MASKED else full, BLOCK, num_stages=1 if MASKED else NUM_STAGES
        ):
            n = at + tl.arange(0, BLOCK)
            next_k, next_v = load_metadata(k, n + BLOCK, length, K), load_metadata(v, n + BLOCK, length, V)
            score = key_scores(parts, sum_q, k, k_meta, n, length, scale_log2, K, MASKED, PLAIN)
            if HAS_OFFSET:
                score += lift[None, :]
            if HAS_BIAS:
                score += load_each(bias, n, length, True)[:, None] * _LOG2E
            if MASKED:
                score = tl.where((n < length)[:, None], score, float("-inf"))
            if HAS_SKIP:
                score = tl.where((n >= skip)[:, None], score, float("-inf"))
            before = top
            top = tl.maximum(top, tl.max(score, 0))
            keep = tl.exp2(before - top)
            p = tl.exp2(score - top[None, :])
            total = total * keep[None, :] + p
            acc, even = add_values(acc, even, keep, p, v, v_meta, n, length, V, parts[0].dtype, MASKED, PLAIN)
            k_meta, v_meta = next_k, next_v

    sums = tl.sum(total, 0)
    tl.store(lse + nth * X + x, (top + tl.log2(sums)) * _LN2, mask=x < X)
    store_values(out + nth.to(tl.int64) * X * D, acc, tl.sum(even, 0), sums, X, V)


def launch(
    q_RXD: Tensor, offset_RX: Tensor | None, memory: Tensor, task: Tensor, order: Tensor | None,
    k_codec: str, v_codec: str, k_groups: int, v_groups: int, scale: float,
    has_bias: bool = False, has_skip: bool = False, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator `attend_tasks`; rows of tasks that do not run stay as they were."""
    _, num_queries, head_dim = q_RXD.shape
    k, v = format_of(k_codec), format_of(v_codec)
    out = torch.empty(len(task), num_queries, head_dim, dtype=torch.float32, device=q_RXD.device)
    lse = torch.empty(len(task), num_queries, dtype=torch.float32, device=q_RXD.device)
    early = begins_early(memory)
    config = config or choose(num_queries, head_dim, q_RXD.dtype, k, v)
    attend_kernel[(len(task if order is None else order),)](
        q_RXD.contiguous(), q_RXD if offset_RX is None else offset_RX.contiguous(),
        memory.view(k.word_dtype), memory.view(v.word_dtype), memory.view(torch.bfloat16), memory.view(torch.float32),
        task, task if order is None else order, out, lse, scale * LOG2E,
        V=v.side(head_dim, v_groups, is_key=False),
        HAS_ORDER=order is not None, HAS_OFFSET=offset_RX is not None, HAS_BIAS=has_bias, HAS_SKIP=has_skip,
        EARLY=early, **constants(q_RXD, k, k_groups, memory, config), **launch_options(early),
    )  # fmt: skip
    return out, lse


def constants(q_RXD: Tensor, k: Format, k_groups: int, memory: Tensor, config: Config) -> dict[str, Any]:
    """What a kernel over tasks is compiled for, and how."""
    _, num_queries, head_dim = q_RXD.shape
    return {
        "X": num_queries,
        "M": padded(num_queries, 8),
        "NUM_COLUMNS": NUM_COLUMNS,
        "K": k.side(head_dim, k_groups, is_key=True),
        "BLOCK": config.block,
        "NUM_STAGES": config.num_stages,
        "PLAIN": is_plain(memory),
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers,
    }


def is_plain(memory: Tensor) -> bool:
    """Whether to do without NVIDIA's instructions: in the interpreter, and on GPUs of others."""
    return not memory.is_cuda or torch.version.cuda is None


def choose(num_queries: int, head_dim: int, q_dtype: torch.dtype, k: Format, v: Format) -> Config:
    """The tuned configuration; dots in fp32 run without tensor cores and need small tiles, as do scales per channel,
    which are loaded for every number of a tile. Many queries (drafts) need the registers of four warps."""
    if q_dtype == torch.float32:
        return _CONFIG[32]
    if k.key_span > 1:
        return Config(32, 4, 2)
    config = _CONFIG[max(k.bits, v.bits)]
    if num_queries > 8:
        config = config._replace(num_warps=max(4, config.num_warps))
    return config if head_dim <= 128 else config._replace(block=max(16, config.block // 2))
