"""Seal kernel: quantise the open blocks of all layers, heads and sequences into their pages in one launch.

N stretches (program each)   E extents   B slots of an open block   D head dim (a power of two)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codec import hadamard
from kvfold.pages.kernels.encode import UNFUSED, put_slots
from kvfold.pages.kernels.encodings import constants
from kvfold.pages.layout import PageClass

# Rows of items: the extent, the open block's first slot, how many, the first one's position, and how many slots of the
# extent are used already.
# Columns of an extent: where the open block's keys and values of its head and its mean key lie, then the addresses of
# the page fields (pages/places.py), the last of them the biases, and of the positions. Addresses count bytes from the
# start of the arena, whether they lie in it or not: states of codecs do not.
NUM_COLUMNS = 3 + 8


@triton.jit
def _seal(
    item: tl.tensor,
    extent: tl.tensor,
    signs: tl.tensor,
    factor: tl.tensor,
    bytes_: tl.tensor,
    halves: tl.tensor,
    floats: tl.tensor,
    words: tl.tensor,
    singles: tl.tensor,
    D: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_FORM: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CLIP: tl.constexpr,
    K_CHANNELS: tl.constexpr,
    K_SPAN: tl.constexpr,
    V_FORM: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CLIP: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    V_SPAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """As `put_slots` takes it."""
    item += tl.program_id(0)
    N = tl.num_programs(0)
    extent += tl.load(item).to(tl.int64) * COLUMNS
    begin, count = tl.load(item + N), tl.load(item + 2 * N)
    position, filled = tl.load(item + 3 * N), tl.load(item + 4 * N)
    nth_B = tl.minimum(tl.arange(0, B), count - 1)  # a span that is not full repeats the last slot
    whole = tl.cdiv(count, K_SPAN) * K_SPAN
    source_BD = (begin + nth_B[:, None]) * D + tl.arange(0, D)[None, :]
    ALIGNED: tl.constexpr = 16 // WIDTH  # said aloud, or loads go one by one
    k_BD = tl.load(floats + tl.multiple_of(tl.load(extent + 0) // WIDTH, ALIGNED) + source_BD)
    v_BD = tl.load(floats + tl.multiple_of(tl.load(extent + 1) // WIDTH, ALIGNED) + source_BD)
    mean = singles + tl.load(extent + 2) // 4
    put_slots(
        k_BD, v_BD, filled, whole, extent + 3, mean, signs, factor, bytes_, halves, floats, B, D, WIDTH,
        K_FORM, K_BITS, K_CLIP, K_CHANNELS, K_SPAN, V_FORM, V_BITS, V_CLIP, V_CHANNELS, V_SPAN, PLAIN,
    )  # fmt: skip
    slot_B, here_B = filled + tl.arange(0, B), tl.arange(0, B) < whole
    if HAS_BIAS:
        tl.store(singles + tl.load(extent + 9) // 4 + slot_B, tl.zeros([B], tl.float32), mask=here_B)
    tl.store(words + tl.load(extent + 10) // 4 + slot_B, (position + nth_B).to(tl.int32), mask=here_B)


def seal_items(item_5N: Tensor, extent_E: Tensor, memory: Tensor, page_class: PageClass, open_len: int) -> None:
    """Encode every item, int32, of a page class that kernels know; `open_len`: the most slots one has. Biases become
    0."""
    head_dim, kv_dtype = page_class.head_dim, page_class.kv_dtype
    _seal[(item_5N.shape[1],)](
        item_5N,
        extent_E,
        hadamard.signs(head_dim, torch.bfloat16, memory.device),
        hadamard.factor(head_dim),
        memory,
        memory.view(torch.bfloat16),
        memory.view(kv_dtype),
        memory.view(torch.int32),
        memory.view(torch.float32),
        D=head_dim,
        B=max(16, page_class.group, triton.next_power_of_2(open_len)),
        WIDTH=kv_dtype.itemsize,
        COLUMNS=NUM_COLUMNS,
        HAS_BIAS=page_class.has_bias,
        PLAIN=not memory.is_cuda,
        **constants(page_class),
        **UNFUSED,
        num_warps=8,
    )
