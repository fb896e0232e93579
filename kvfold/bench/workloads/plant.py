"""Where planted sentences stand among filler: at depths from 0 (the beginning) to 1 (the end)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Planted(NamedTuple):
    depth: float
    text: str


def spread(place: int, count: int) -> float:
    """The depth of one of `count` things that stand in the middles of equal parts."""
    return (place + 0.5) / count


def scatter(planted: Sequence[Planted], sentences: Sequence[str]) -> list[str]:
    """The sentences with each planted one before the one at its depth; those at one depth keep their order."""
    found = list(sentences)
    for depth, text in sorted(planted, key=lambda each: each.depth)[::-1]:
        found.insert(round(depth * len(sentences)), text)
    return found
