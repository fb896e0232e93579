"""Write kernel: quantise slots of all layers and heads, of one sequence or many, into their pages in one launch.

It serves seals, whose slots come from open blocks at consecutive positions, and compression rounds, whose slots come
with their positions and biases.

    N stretches: slots of one head that go to adjacent places of one extent   E extents
    B slots of a program   D head dim (a power of two)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codec import hadamard
from kvfold.pages.kernels.encode import UNFUSED, put_slots
from kvfold.pages.kernels.encodings import encoding_of
from kvfold.pages.layout import PageClass


@triton.jit
def _write(
    item: tl.tensor, extent: tl.tensor, signs: tl.tensor, factor: tl.tensor,
    bytes_: tl.tensor, halves: tl.tensor, floats: tl.tensor, words: tl.tensor, longs: tl.tensor, singles: tl.tensor,
    D: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_SEAL: tl.constexpr, PLAIN: tl.constexpr,
) -> None:  # fmt: skip
    """As `put_slots` takes it."""
    item += tl.program_id(0)
    N = tl.num_programs(0)
    extent += tl.load(item).to(tl.int64) * COLUMNS
    source, count, begin = tl.load(item + N), tl.load(item + 2 * N), tl.program_id(1) * B
    if begin < count:
        nth_B = source + tl.minimum(begin + tl.arange(0, B), count - 1)  # a span that is not full repeats the last slot
        whole = tl.cdiv(count, K.span) * K.span
        source_BD = nth_B[:, None] * D + tl.arange(0, D)[None, :]
        WIDTH: tl.constexpr = floats.dtype.element_ty.primitive_bitwidth // 8
        ALIGNED: tl.constexpr = 16 // WIDTH  # said aloud, or loads go one by one
        k_BD = tl.load(floats + tl.multiple_of(tl.load(extent + 0) // WIDTH, ALIGNED) + source_BD)
        v_BD = tl.load(floats + tl.multiple_of(tl.load(extent + 1) // WIDTH, ALIGNED) + source_BD)
        mean = singles + tl.load(extent + 2) // 4
        first = tl.load(item + 4 * N) + begin
        put_slots(
            k_BD, v_BD, first, whole - begin, extent + 3, mean, signs, factor, bytes_, halves, floats, K, V, PLAIN
        )
        slot_B, here_B = first + tl.arange(0, B), begin + tl.arange(0, B) < whole
        if IS_SEAL:
            position_B = tl.load(item + 3 * N) - source + nth_B
        else:
            position_B = tl.load(longs + tl.load(extent + 11) // 8 + nth_B)
        if HAS_BIAS:
            bias_B = tl.zeros([B], tl.float32)
            if not IS_SEAL:
                bias_B = tl.load(singles + tl.load(extent + 12) // 4 + nth_B)
            tl.store(singles + tl.load(extent + 9) // 4 + slot_B, bias_B, mask=here_B)
        tl.store(words + tl.load(extent + 10) // 4 + slot_B, position_B.to(tl.int32), mask=here_B)


def write_slots(
    item_5N: Tensor, extent_E: Tensor, memory: Tensor, page_class: PageClass, *, block: int, most_slots: int
) -> None:
    """Encode every stretch, of at most so many slots, of a page class that kernels know; a program takes `block` slots.

    Rows of items, int32: the extent, the first slot in the source of its head, how many, the first one's position, and
    how many slots of the extent are used already.
    Columns of an extent, int64: where keys, values and mean key of its head's source lie, then the addresses of the
    page fields (pages/places.py), the last of them the biases, and of the positions; in a compression round also where
    positions (int64) and biases of the source lie: a seal counts positions on, and its biases are 0. Addresses count
    bytes from the start of the arena, whether they lie in it or not.
    """
    head_dim, num_columns = page_class.head_dim, extent_E.shape[1]
    block = max(16, page_class.group, triton.next_power_of_2(block))
    _write[(item_5N.shape[1], triton.cdiv(most_slots, block))](
        item_5N, extent_E,
        hadamard.signs(head_dim, torch.bfloat16, memory.device), hadamard.factor(head_dim),
        memory, memory.view(torch.bfloat16), memory.view(page_class.kv_dtype),
        memory.view(torch.int32), memory.view(torch.int64), memory.view(torch.float32),
        D=head_dim, B=block, COLUMNS=num_columns, K=encoding_of(page_class, "k"), V=encoding_of(page_class, "v"),
        HAS_BIAS=page_class.has_bias, IS_SEAL=num_columns == 11, PLAIN=not memory.is_cuda, num_warps=8, **UNFUSED,
    )  # fmt: skip
