"""Where the slots of a layer lie, for attention that reads them there (avx512_attention.py).

H KV heads   P parts of a head's slots   N flat slots of a run   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.codec.base import SIDES
from kvfold.pages.dequantize import decode_run
from kvfold.pages.layer import LayerPages

Parts = NDArray[np.int64]  # [H, P, 4]: addresses of keys and values, slots, and whether they are bf16, else fp32
LENGTH, IS_BF16 = 2, 3  # columns
_FORMS = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class StoredParts:
    part_HP4: Parts
    holding: list[Tensor]  # what the addresses point into

    @property
    def are_even(self) -> bool:
        """Whether heads have as many slots, and some."""
        num_H = self.part_HP4[:, :, LENGTH].sum(1)
        return bool(num_H[0]) and bool((num_H == num_H[0]).all())


def stored_parts(layers: Sequence[LayerPages], dtype: torch.dtype) -> StoredParts | None:
    """The slots of a layer over some segments, oldest first, stored as floats of this type; None where they are not."""
    heads: list[list[tuple[int, int, int, int]]] = [[] for _ in range(layers[0].num_heads)]
    holding: list[Tensor] = []
    for pages in layers:
        if dtype not in _FORMS or not pages.page_class.is_plain:
            return None
        for run in pages.runs():
            k_ND, v_ND = (decode_run(pages, run, side, dtype) for side in SIDES)
            if not (k_ND.is_contiguous() and v_ND.is_contiguous()):
                return None
            holding += k_ND, v_ND
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                k, v = (x_ND.data_ptr() + start * x_ND.shape[1] * x_ND.element_size() for x_ND in (k_ND, v_ND))
                if length:
                    heads[head].append((k, v, length, _FORMS[dtype]))
    most = max(map(len, heads))
    part_HP4 = np.zeros((len(heads), most, 4), dtype=np.int64)
    for head, parts in enumerate(heads):
        part_HP4[head, : len(parts)] = np.array(parts, dtype=np.int64).reshape(-1, 4)
    return StoredParts(part_HP4, holding)


def part_of(k_HSD: Tensor, v_HSD: Tensor) -> Parts:
    """Slots in fp32 as one part of each head."""
    found_HP4, (num_heads, num_slots) = np.zeros((len(k_HSD), 1, 4), dtype=np.int64), k_HSD.shape[:2]
    for side, x_HSD in enumerate((k_HSD, v_HSD)):
        found_HP4[:, 0, side] = x_HSD.data_ptr() + 4 * x_HSD.stride(0) * np.arange(num_heads)
    found_HP4[:, 0, LENGTH] = num_slots
    return found_HP4


def reads_head_dim(head_dim: int) -> bool:
    """Whether the kernel takes heads of so many channels: whole tiles, and a register at least."""
    return head_dim % 8 == 0 and head_dim >= 16
