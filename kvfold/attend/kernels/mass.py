"""Attention mass kernel: the weight each stored slot receives from the queries of a step, given log-sum-exps.

Scores are computed again, because a slot's share needs the log-sum-exp over everything its row saw, which is known only
after the parts were merged; keeping the scores of the first pass would write more bytes than codes of 4 bits read.

    R rows of queries   X queries of a row   D head dim   N slots of a tile
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.attend.kernels.decode import LOG2E, Config, choose, constants
from kvfold.attend.kernels.formats import format_of
from kvfold.attend.kernels.tile import elements, key_scores, load_each, load_metadata, query_parts, side_pointers

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def mass_kernel(
    q: tl.tensor, offset: tl.tensor,
    k_memory: tl.tensor, meta: tl.tensor, biases: tl.tensor,
    tasks: tl.tensor, order: tl.tensor,
    lse: tl.tensor, row_of_task: tl.tensor, mass: tl.tensor, scale_log2: tl.tensor,
    X: tl.constexpr, M: tl.constexpr, NUM_COLUMNS: tl.constexpr, K: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr, PLAIN: tl.constexpr,
) -> None:  # fmt: skip
    nth = tl.program_id(0)
    if HAS_ORDER:
        nth = tl.load(order + nth)
    task = tasks + nth.to(tl.int64) * NUM_COLUMNS
    length = tl.load(task + 1).to(tl.int32)
    if length == 0:
        return
    row = tl.load(task)
    k = side_pointers(k_memory, meta, task + 2)
    bias = biases + elements(tl.load(task + 8), biases.dtype.element_ty)
    mass += tl.load(task + 9)
    skip = tl.load(task + 10).to(tl.int32) if HAS_SKIP else 0

    x = tl.arange(0, M)
    parts, sum_q = query_parts(q + row * X * K.head_dim, X, M, K)
    seen = tl.load(row_of_task + nth).to(tl.int64) * X
    lift = -tl.load(lse + seen + x, mask=x < X, other=float("inf")) * _LOG2E  # padded rows: exp2(-inf) adds nothing
    lift = tl.where(lift == float("inf"), float("-inf"), lift)  # nor does a lane without a sequence
    if HAS_OFFSET:
        lift += tl.load(offset + row * X + x, mask=x < X, other=0.0).to(tl.float32) * scale_log2
    # Metadata are fetched a tile ahead: the compiler does so for codes, whose loads feed dots, but not for these.
    k_meta = load_metadata(k, tl.arange(0, BLOCK), length, K)
    full = length // BLOCK * BLOCK
    for MASKED in tl.static_range(2):  # whole tiles, then what is left of one
        for at in tl.range(
            full if MASKED else 0, length if MASKED else full, BLOCK, num_stages=1 if MASKED else NUM_STAGES
        ):
            n = at + tl.arange(0, BLOCK)
            next_k = load_metadata(k, n + BLOCK, length, K)
            score = key_scores(parts, sum_q, k, k_meta, n, length, scale_log2, K, MASKED, PLAIN)
            score += lift[None, :]
            if HAS_BIAS:
                score += load_each(bias, n, length, True)[:, None] * _LOG2E
            share = tl.sum(tl.exp2(score), 1)
            own = (n >= skip) & (n < length)
            # A slot belongs to one task of a launch, so no other program adds here.
            tl.store(mass + n, tl.load(mass + n, mask=own, other=0.0) + share, mask=own)
            k_meta = next_k


def launch(
    q_RXD: Tensor, offset_RX: Tensor | None, memory: Tensor, task: Tensor, order: Tensor | None,
    lse_RX: Tensor, row_of_task: Tensor, k_codec: str, k_groups: int, scale: float, mass: Tensor,
    has_bias: bool = False, has_skip: bool = False, config: Config | None = None,
) -> None:  # fmt: skip
    """The operator `task_mass`."""
    _, num_queries, head_dim = q_RXD.shape
    k = format_of(k_codec)
    config = config or choose(num_queries, head_dim, q_RXD.dtype, k, k)
    mass_kernel[(len(task if order is None else order),)](
        q_RXD.contiguous(), q_RXD if offset_RX is None else offset_RX.contiguous(),
        memory.view(k.word_dtype), memory.view(torch.bfloat16), memory.view(torch.float32),
        task, task if order is None else order,
        lse_RX.contiguous(), row_of_task, mass, scale * LOG2E,
        HAS_ORDER=order is not None, HAS_OFFSET=offset_RX is not None, HAS_BIAS=has_bias, HAS_SKIP=has_skip,
        **constants(q_RXD, k, k_groups, memory, config),
    )  # fmt: skip
