"""Whole numbers that add up: a total shared out by weight, within bounds, by the method of largest remainders."""

from __future__ import annotations

from collections.abc import Sequence

_HALVINGS = 100  # of an interval that starts below 2^64: to the last bit of a float


def apportion(total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Shares of `total` in proportion to positive weights, each within [low, high]; ties to the lower index.

    The shares add up to `total` exactly, or to sum(low) above it or sum(high) below it where the bounds force that.
    """
    total = max(sum(low), min(total, sum(high)))
    quotas = _quotas(total, weights, low, high)
    counts = [min(int(quota), top) for quota, top in zip(quotas, high, strict=True)]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - quotas[i])
    room = [i for i in by_remainder if counts[i] < high[i]]
    for i in room[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _quotas(total: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[float]:
    """weight * level clamped to the bounds, at the level where they add up to `total` (found by bisection)."""

    def at(level: float) -> list[float]:
        return [min(max(w * level, lo), hi) for w, lo, hi in zip(weights, low, high, strict=True)]

    below, above = 0.0, max((hi / w for w, hi in zip(weights, high, strict=True)), default=0.0)
    for _ in range(_HALVINGS):
        level = (below + above) / 2
        below, above = (level, above) if sum(at(level)) < total else (below, level)
    return at(above)
