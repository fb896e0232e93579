"""What slots cost in bytes, where that is not the same for each: a codec may be of some layers alone, and what is kept
beside the slots of a layer may be as long as its longest head. A budget may gather slots where they are dear, so that
as many as a size allows on average are more bytes than it allows.

    H heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Cost = Callable[[list[list[int]]], float]  # of so many slots in each head of each layer


def within_cost(allocate: Callable[[int], list[Tensor]], slots_per_head: int, cost: Cost) -> list[Tensor]:
    """`allocate(n)`, int64 [H] of each layer, for the largest n that costs no more than `slots_per_head` slots in every
    head would. Fewer slots are never others: a slot that was evicted before, not being among more of them, stays
    evicted."""
    counts = allocate(slots_per_head)
    most = cost([[slots_per_head] * len(count_H) for count_H in counts])
    if cost(_on_host(counts)) <= most:
        return counts

    def fewer(slots: int) -> list[Tensor]:
        return [few_H.minimum(count_H) for few_H, count_H in zip(allocate(slots), counts, strict=True)]

    low, high = 0, slots_per_head  # of 0 slots those stay that have to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(_on_host(fewer(middle))) <= most else (low, middle)
    return fewer(low)


def _on_host(counts: Sequence[Tensor]) -> list[list[int]]:
    found: list[list[int]] = torch.stack(list(counts)).tolist()
    return found
