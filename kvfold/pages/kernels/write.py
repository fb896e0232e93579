"""Write kernel: quantise new slots of all layers and heads of a sequence into their pages.

N stretches   B slots of a program   D head dim (a power of two)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codec import hadamard
from kvfold.codec.kivi import GROUP
from kvfold.pages.kernels.encode import UNFUSED, put_slots
from kvfold.pages.kernels.encodings import constants
from kvfold.pages.layout import PageClass

# Columns of a stretch: how many slots; where their keys, values, positions (int64), biases and the mean key of their
# head lie; and where they go: the addresses of page fields, then of positions (pages/places.py). Addresses count bytes
# from the start of the arena, whether they lie in it or not.
_SLOTS = GROUP  # of a program, in which spans of keys begin and end


@triton.jit
def _write(
    stretch: tl.tensor,
    signs: tl.tensor,
    factor: tl.tensor,
    bytes_: tl.tensor,
    halves: tl.tensor,
    floats: tl.tensor,
    words: tl.tensor,
    longs: tl.tensor,
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
    stretch += tl.program_id(0) * COLUMNS
    count, begin = tl.load(stretch), tl.program_id(1) * B
    if begin < count:
        slot_B = begin + tl.arange(0, B)
        nth_B = tl.minimum(slot_B, count - 1)  # a span that is not full repeats the last slot
        whole = tl.cdiv(count, K_SPAN) * K_SPAN
        tile_BD = nth_B[:, None] * D + tl.arange(0, D)[None, :]
        k_BD = tl.load(floats + tl.load(stretch + 1) // WIDTH + tile_BD)
        v_BD = tl.load(floats + tl.load(stretch + 2) // WIDTH + tile_BD)
        mean = singles + tl.load(stretch + 5) // 4
        put_slots(
            k_BD, v_BD, begin, whole - begin, stretch + 6, mean, signs, factor, bytes_, halves, floats, B, D, WIDTH,
            K_FORM, K_BITS, K_CLIP, K_CHANNELS, K_SPAN, V_FORM, V_BITS, V_CLIP, V_CHANNELS, V_SPAN, PLAIN,
        )  # fmt: skip
        here_B = slot_B < whole
        if HAS_BIAS:
            bias_B = tl.load(singles + tl.load(stretch + 4) // 4 + nth_B)
            tl.store(singles + tl.load(stretch + 12) // 4 + slot_B, bias_B, mask=here_B)
        position_B = tl.load(longs + tl.load(stretch + 3) // 8 + nth_B)
        tl.store(words + tl.load(stretch + 13) // 4 + slot_B, position_B.to(tl.int32), mask=here_B)


def write_stretches(stretch_N: Tensor, most_slots: int, memory: Tensor, page_class: PageClass) -> None:
    """Encode every stretch, of at most so many slots, of a page class that kernels know."""
    head_dim, kv_dtype = page_class.head_dim, page_class.kv_dtype
    _write[(len(stretch_N), triton.cdiv(most_slots, _SLOTS))](
        stretch_N,
        hadamard.signs(head_dim, torch.bfloat16, memory.device),
        hadamard.factor(head_dim),
        memory,
        memory.view(torch.bfloat16),
        memory.view(kv_dtype),
        memory.view(torch.int32),
        memory.view(torch.int64),
        memory.view(torch.float32),
        D=head_dim,
        B=_SLOTS,
        WIDTH=kv_dtype.itemsize,
        COLUMNS=stretch_N.shape[1],
        HAS_BIAS=page_class.has_bias,
        PLAIN=not memory.is_cuda,
        **constants(page_class),
        **UNFUSED,
        num_warps=8,
    )
