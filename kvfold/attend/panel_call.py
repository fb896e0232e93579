"""Calls of attention by compiled kernels whose rows fill panels of 16 lanes (avx512_attention.py, amx_attention.py).

H KV heads   G query heads per KV head   T queries   D head dim   S slots   R rows of a KV head   P parts of its slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.stored_parts import LENGTH, Parts, part_of

_LANES = 16
_UNITS = 3  # for each thread; of fewer, one thread has the last alone


class Arguments(NamedTuple):
    """Of a kernel: addresses and strides (of heads, groups, queries) of queries and output, then the strides of keys
    and values from slot to slot; shape: KV heads, group, queries, slots, 1 where a query hides a slot more than the
    next one does, head dim, most panels of a unit of work."""

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    part_HP4: Parts
    shape: tuple[int, int, int, int, int, int, int]
    scale_1: NDArray[np.float32]
    lse_HR: NDArray[np.float32]


def panels_of_unit(most: int, num_panels: int, num_threads: int) -> int:
    """Up to `most`, of so many that are to be read."""
    while most > 1 and num_panels < _UNITS * num_threads * most:
        most //= 2
    return most


@dataclass(frozen=True)
class PanelCall:
    run: Callable[[Arguments, int], Any]  # in so many threads
    most_panels: int  # of a unit
    reads_head_dim: Callable[[int], bool]
    attend_behind: Callable[..., Tensor] | None = None  # for several sequences that share their first slots

    def can_attend(self, q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> bool:
        """Whether shapes and layouts are such as the kernel reads."""
        is_read = all(
            x.dtype == torch.float32 and x.stride(-1) == 1 and not x.requires_grad for x in (q_HGTD, k_HSD, v_HSD)
        )
        are_even = q_HGTD.shape[-1] == k_HSD.shape[-1] == v_HSD.shape[-1]
        return is_read and are_even and scale > 0 and self.reads_head_dim(q_HGTD.shape[-1])

    def attend(
        self, q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output [H, G, T, D] and natural-log-sum-exp [H, G, T]."""
        between = k_HSD.stride(1), v_HSD.stride(1)
        return self.attend_parts(q_HGTD, part_of(k_HSD, v_HSD), scale, between, causal=causal)

    def attend_parts(
        self, q_HGTD: Tensor, part_HP4: Parts, scale: float, strides: tuple[int, int], *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The same over parts of which each head has as many slots; `strides` of keys and values from slot to slot."""
        num_heads, group, num_queries, head_dim = q_HGTD.shape
        out_HGTD = q_HGTD.new_empty(num_queries, num_heads, group, head_dim).permute(1, 2, 0, 3)
        lse_HR = np.empty((num_heads, num_queries * group), dtype=np.float32)
        num_threads, num_panels = torch.get_num_threads(), -(-num_queries * group // _LANES)
        most = panels_of_unit(self.most_panels, num_heads * num_panels, num_threads)
        num_slots = int(part_HP4[0, :, LENGTH].sum())
        arguments = Arguments(
            addresses=np.array([q_HGTD.data_ptr(), out_HGTD.data_ptr()]),
            strides=np.array([*q_HGTD.stride()[:3], *out_HGTD.stride()[:3], *strides]),
            part_HP4=part_HP4,
            shape=(num_heads, group, num_queries, num_slots, int(causal), head_dim, most),
            scale_1=np.array([scale], dtype=np.float32),
            lse_HR=lse_HR,
        )
        self.run(arguments, num_threads)
        lse = torch.from_numpy(lse_HR).view(num_heads, num_queries, group).transpose(1, 2)
        return out_HGTD, lse
