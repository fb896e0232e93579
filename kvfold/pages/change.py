"""What a seal changes in one layer: the new slots to encode, and which stored ones stay.

N flat slots, head after head   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class EvictedSlots(NamedTuple):
    """New slots that were dropped, head after head, where they are to be offloaded; on the host."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]


@dataclass
class LayerChange:
    """What a seal does to one layer: stored slots that stay (None: all), and new slots to encode, head after head.

    `drop_first`: stored slots of every head that a sliding window has left behind. The reader masks them, so they only
    go where that needs no copy of a shared segment.
    """

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]
    keep: list[Tensor] | None = None
    drop_first: int = 0
    bias_N: Tensor | None = None  # of the new slots; None: 0
    gone: tuple[EvictedSlots, ...] = ()
