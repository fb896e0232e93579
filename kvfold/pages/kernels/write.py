"""New slots of all layers and heads of a sequence, encoded where they will lie.

N stretches   B slots of a program   D head dim (a power of two)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codec import hadamard
from kvfold.codec.base import Codec
from kvfold.pages.kernels.encode import put_slots, width

# Columns of a stretch: how many slots; where their keys, values, positions (int64), biases and the mean key of their
# head lie; and where they go: the addresses of page fields, then of positions (pages/table.py). Addresses count bytes
# from the start of the arena, whether they lie in it or not.
_SLOTS = 32  # of a program


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
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_CLIP: tl.constexpr,
    V_CLIP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """As `put_slots` takes it."""
    stretch += tl.program_id(0) * COLUMNS
    count, begin = tl.load(stretch), tl.program_id(1) * B
    if begin < count:
        slot_B = begin + tl.arange(0, B)
        here_B = slot_B < count
        tile_BD = slot_B[:, None] * D + tl.arange(0, D)[None, :]
        k_BD = tl.load(floats + tl.load(stretch + 1) // WIDTH + tile_BD, mask=here_B[:, None], other=0.0)
        v_BD = tl.load(floats + tl.load(stretch + 2) // WIDTH + tile_BD, mask=here_B[:, None], other=0.0)
        mean = singles + tl.load(stretch + 5) // 4
        put_slots(
            k_BD, v_BD, here_B, slot_B, stretch + 6, mean, signs, factor, bytes_, halves, floats,
            B, D, WIDTH, K_BITS, V_BITS, K_CLIP, V_CLIP, PLAIN,
        )  # fmt: skip
        if HAS_BIAS:
            bias_B = tl.load(singles + tl.load(stretch + 4) // 4 + slot_B, mask=here_B, other=0.0)
            tl.store(singles + tl.load(stretch + 12) // 4 + slot_B, bias_B, mask=here_B)
        position_B = tl.load(longs + tl.load(stretch + 3) // 8 + slot_B, mask=here_B, other=0)
        tl.store(words + tl.load(stretch + 13) // 4 + slot_B, position_B.to(tl.int32), mask=here_B)


def write_stretches(
    stretch_N: Tensor,
    most_slots: int,
    memory: Tensor,
    head_dim: int,
    kv_dtype: torch.dtype,
    k: Codec,
    v: Codec,
    has_bias: bool,
) -> None:
    """Encode every stretch, of at most so many slots, by integer codecs or as it is."""
    (k_bits, k_clip), (v_bits, v_clip) = width(k), width(v)
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
        K_BITS=k_bits,
        V_BITS=v_bits,
        K_CLIP=k_clip,
        V_CLIP=v_clip,
        HAS_BIAS=has_bias,
        PLAIN=not memory.is_cuda,
        num_warps=8,
    )
