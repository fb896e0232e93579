"""The change of one layer at a seal: new slots to encode, and which stored slots are kept.

N flat slots, head after head   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class EvictedSlots(NamedTuple):
    """Evicted new slots to be offloaded, head after head; on the host."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]


@dataclass
class LayerChange:
    """Stored slots to keep (None: all), and new slots to encode, head after head.

    `drop_first`: stored slots of every head that a sliding window has passed. Attention masks them, so they are dropped
    only if that needs no copy of a shared segment.
    """

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    counts: list[int]
    keep: list[Tensor] | None = None
    drop_first: int = 0
    bias_N: Tensor | None = None  # of the new slots; None: 0
    evicted: tuple[EvictedSlots, ...] = ()
