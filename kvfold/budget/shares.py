"""Slots shared out: a total by weight within bounds (largest remainders), scores as weights, bytes as a bound.

H heads   S slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor


def apportion(total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Shares of `total` in proportion to positive weights, each within [low, high]; ties to the lower index.

    The shares add up to `total` exactly, or to sum(low) above it or sum(high) below it where the bounds force that.
    """
    total = _possible(total, low, high)
    exact = _quotas(total, weights, low, high)
    counts = [min(int(quota), top) for quota, top in zip(exact, high, strict=True)]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    room = [i for i in by_remainder if counts[i] < high[i]]
    for i in room[: total - sum(counts)]:
        counts[i] += 1
    return counts


def share_free(
    total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int], *, exact: bool
) -> list[int]:
    """`low` for each and a share, in proportion to weight, of what `total` leaves; none above `high`.

    Without `exact` shares are rounded up. One more with a low of its own makes less free and the level lower, so the
    shares of the others, rounded up or in the end exact, only shrink: what a stream of layers needs.
    """
    room = [top - least for least, top in zip(low, high, strict=True)]
    free, none = max(0, total - sum(low)), [0] * len(room)
    more = apportion(free, weights, none, room) if exact else map(ceil, _quotas(free, weights, none, room))
    return [least + extra for least, extra in zip(low, more, strict=True)]


def _quotas(total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[float]:
    """weight * level clamped to the bounds, at the level where they add up to `total`, or as near as bounds allow.

    Whoever is out of bounds at the level of the moment is set to its bound and the rest shared anew. Only the side that
    weighs more is set: it pushes the level further its own way, while the other side may yet come back inside.
    """
    total = _possible(total, low, high)
    fixed: dict[int, float] = {}
    while True:
        free = [i for i in range(len(weights)) if i not in fixed]
        level = (total - sum(fixed.values())) / sum(weights[i] for i in free) if free else 0.0
        wish = {i: weights[i] * level for i in free}
        over = {i: high[i] for i in free if wish[i] > high[i]}
        under = {i: low[i] for i in free if wish[i] < low[i]}
        excess = sum(wish[i] - over[i] for i in over) - sum(under[i] - wish[i] for i in under)
        bound = over if excess >= 0 else under
        if not bound:
            return [(fixed | wish)[i] for i in range(len(weights))]
        fixed |= bound


def _possible(total: int, low: Sequence[int], high: Sequence[int]) -> int:
    return max(sum(low), min(total, sum(high)))


def mass(score_HS: Tensor) -> Tensor:
    """The scores of one layer, none below 0; protected (+inf) and missing (-inf) slots weigh nothing. Norms and cosines
    may lie below 0: those are shifted up by the lowest of their layer, so that order and gaps stay."""
    finite_HS = score_HS.isfinite()
    known_HS = score_HS.where(finite_HS, 0.0)
    return (known_HS - known_HS.amin().clamp(max=0.0)).where(finite_HS, 0.0)


def ranked(weight_HS: Tensor, score_HS: Tensor) -> Tensor:
    """What buying one more slot of a head is worth, slot by slot: weights of the candidates in their given order, then
    -inf for those that do not exist and, last, +inf for those that must stay."""
    protected_H1 = (score_HS == torch.inf).sum(-1, keepdim=True)
    candidates_H1 = score_HS.isfinite().sum(-1, keepdim=True)
    slot_S = torch.arange(score_HS.shape[-1], device=score_HS.device)
    price_HS = weight_HS.masked_fill(slot_S >= candidates_H1, -torch.inf)
    return price_HS.masked_fill(slot_S >= score_HS.shape[-1] - protected_H1, torch.inf)


Cost = Callable[[list[list[int]]], float]  # of so many slots in each head of each layer


def within_cost(allocate: Callable[[int], list[Tensor]], slots_per_head: int, cost: Cost) -> list[Tensor]:
    """`allocate(n)`, int64 [H] of each layer, for the largest n that costs no more than `slots_per_head` slots in every
    head would. Fewer slots are never others: a slot that was evicted before, not being among more of them, stays
    evicted."""
    counts = allocate(slots_per_head)
    most = cost([[slots_per_head] * len(count_H) for count_H in counts])
    if cost(on_host(counts)) <= most:
        return counts

    def fewer(slots: int) -> list[Tensor]:
        return [few_H.minimum(count_H) for few_H, count_H in zip(allocate(slots), counts, strict=True)]

    low, high = 0, slots_per_head  # of 0 slots those stay that have to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(on_host(fewer(middle))) <= most else (low, middle)
    return fewer(low)


def on_host(numbers: Sequence[Tensor]) -> list[Any]:
    """Tensors of one shape as lists, in one copy."""
    return list(torch.stack(list(numbers)).tolist())
