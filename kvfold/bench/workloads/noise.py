"""The five sentences that stand for nothing, in passkey retrieval (arXiv:2305.16300) and whatever followed it."""

from __future__ import annotations

from collections.abc import Sequence

SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
LINE = " ".join(SENTENCES)


def lines(hidden: Sequence[tuple[float, str]], count: int) -> str:
    """`count` lines of noise with each hidden line at its depth."""
    return insert(hidden, [LINE] * count, "\n")


def insert(hidden: Sequence[tuple[float, str]], units: Sequence[str], between: str) -> str:
    """The units, joined, with each hidden one before the unit at its depth from 0 (the start) to 1 (the end)."""
    found = list(units)
    for depth, unit in sorted(hidden, key=lambda pair: pair[0], reverse=True):
        found.insert(int(depth * len(units)), unit)
    return between.join(found)
