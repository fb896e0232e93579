"""Whole numbers that add up: a total shared out by weight, within bounds, by the method of largest remainders."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


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
