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

from kvfold.attend.kernels.decode import LOG2E, Config, choose, is_plain, padded
from kvfold.attend.kernels.formats import NUM_COLUMNS, format_of
from kvfold.attend.kernels.keys import key_scores, query_parts
from kvfold.attend.kernels.tile import elements, load_each

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def mass_kernel(
    q: tl.tensor,
    offset: tl.tensor,
    k_memory: tl.tensor,
    meta: tl.tensor,
    biases: tl.tensor,
    tasks: tl.tensor,
    order: tl.tensor,
    lse: tl.tensor,
    row_of_task: tl.tensor,
    mass: tl.tensor,
    scale_log2: tl.tensor,
    X: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    K_FORM: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORDS: tl.constexpr,
    K_PAD: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_SPAN: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    nth = tl.program_id(0)
    if HAS_ORDER:
        nth = tl.load(order + nth)
    task = tasks + nth.to(tl.int64) * NUM_COLUMNS
    length = tl.load(task + 1).to(tl.int32)
    if length == 0:
        return
    row = tl.load(task)
    k_code = k_memory + elements(tl.load(task + 2), k_memory.dtype.element_ty)
    k_scale = meta + elements(tl.load(task + 3), meta.dtype.element_ty)
    k_zero = meta + elements(tl.load(task + 4), meta.dtype.element_ty)
    bias = biases + elements(tl.load(task + 8), biases.dtype.element_ty)
    mass += tl.load(task + 9)
    skip = tl.load(task + 10).to(tl.int32) if HAS_SKIP else 0

    x = tl.arange(0, M)
    parts, sum_q = query_parts(q + row * X * D, X, M, D, K_WORDS, K_PAD)
    seen = tl.load(row_of_task + nth).to(tl.int64) * X
    lift = -tl.load(lse + seen + x, mask=x < X, other=float("inf")) * _LOG2E  # padded rows: exp2(-inf) adds nothing
    lift = tl.where(lift == float("inf"), float("-inf"), lift)  # nor does a lane without a sequence
    if HAS_OFFSET:
        lift += tl.load(offset + row * X + x, mask=x < X, other=0.0).to(tl.float32) * scale_log2
    # Metadata are fetched a tile ahead: the compiler does so for codes, whose loads feed dots, but not for these.
    K_EACH: tl.constexpr = K_FORM != "float" and K_GROUPS == 1
    first = tl.arange(0, BLOCK)
    k_scale_n = load_each(k_scale, first, length, K_EACH)
    k_zero_n = load_each(k_zero, first, length, K_EACH and K_FORM == "int")
    full = length // BLOCK * BLOCK
    for MASKED in tl.static_range(2):  # whole tiles, then what is left of one
        for at in tl.range(
            full if MASKED else 0, length if MASKED else full, BLOCK, num_stages=1 if MASKED else NUM_STAGES
        ):
            n = at + tl.arange(0, BLOCK)
            next_k_scale_n = load_each(k_scale, n + BLOCK, length, K_EACH)
            next_k_zero_n = load_each(k_zero, n + BLOCK, length, K_EACH and K_FORM == "int")
            score = key_scores(
                parts, sum_q, k_code, k_scale, k_zero, k_scale_n, k_zero_n, n, length, scale_log2,
                D, K_WORDS, K_PAD, K_FORM, K_BITS, K_GROUPS, K_SPAN, MASKED, PLAIN,
            )  # fmt: skip
            score += lift[None, :]
            if HAS_BIAS:
                score += load_each(bias, n, length, True)[:, None] * _LOG2E
            share = tl.sum(tl.exp2(score), 1)
            own = (n >= skip) & (n < length)
            # A slot belongs to one task of a launch, so no other program adds here.
            tl.store(mass + n, tl.load(mass + n, mask=own, other=0.0) + share, mask=own)
            k_scale_n, k_zero_n = next_k_scale_n, next_k_zero_n


def launch(
    q_RXD: Tensor,
    offset_RX: Tensor | None,
    memory: Tensor,
    task: Tensor,
    order: Tensor | None,
    lse_RX: Tensor,
    row_of_task: Tensor,
    k_codec: str,
    k_groups: int,
    scale: float,
    mass: Tensor,
    has_bias: bool = False,
    has_skip: bool = False,
    config: Config | None = None,
) -> None:
    """Add each slot's attention, summed over the queries of its row, to mass[task.MASS + slot]."""
    _, num_queries, head_dim = q_RXD.shape
    k = format_of(k_codec)
    config = config or choose(num_queries, head_dim, q_RXD.dtype, k, k)
    mass_kernel[(len(task if order is None else order),)](
        q_RXD.contiguous(),
        q_RXD if offset_RX is None else offset_RX.contiguous(),
        memory.view(k.word_dtype),
        memory.view(torch.bfloat16),
        memory.view(torch.float32),
        task,
        task if order is None else order,
        lse_RX.contiguous(),
        row_of_task,
        mass,
        scale * LOG2E,
        X=num_queries,
        M=padded(num_queries, 8),
        D=head_dim,
        NUM_COLUMNS=NUM_COLUMNS,
        K_FORM=k.form,
        K_BITS=k.bits,
        K_WORDS=k.num_words(head_dim),
        K_PAD=padded(k.num_words(head_dim), 16),
        K_GROUPS=k.groups(head_dim, k_groups, is_key=True),
        K_SPAN=k.key_span,
        HAS_ORDER=order is not None,
        HAS_OFFSET=offset_RX is not None,
        HAS_BIAS=has_bias,
        HAS_SKIP=has_skip,
        BLOCK=config.block,
        NUM_STAGES=config.num_stages,
        PLAIN=is_plain(memory),
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
