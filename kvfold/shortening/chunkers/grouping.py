"""Groups of consecutive parts: runs that no group crosses, and cuts that leave groups of nearly equal length.

n parts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Unit
from kvfold.shortening.parts import ends_paragraph
from kvfold.shortening.tokens import TokenOffsets

_ALONE = ("heading", "code")


def tokens_before(parts: Sequence[Unit], tokens: TokenOffsets) -> NDArray[np.int64]:
    """[n + 1]: tokens that begin before each part, and in all."""
    bounds = [part.start for part in parts] + ([parts[-1].end] if parts else [0])
    return np.searchsorted(tokens.starts, np.array(bounds, dtype=np.int64))


def is_alone(part: Unit) -> bool:
    """Headings and code are units of their own, so that they can stay by themselves."""
    return part.kind in _ALONE


def paragraphs(text: str, parts: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    """Runs of parts without a blank line, a heading or code between them."""
    low = 0
    for number in range(1, len(parts) + 1):
        if number == len(parts) or _ends(text, parts[number - 1], parts[number]):
            yield low, number
            low = number


def _ends(text: str, part: Unit, following: Unit) -> bool:
    return is_alone(part) or is_alone(following) or ends_paragraph(text, part)


def cut_evenly(low: int, high: int, before: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Parts `low` to `high` in groups of nearly equal length, none above `size` tokens but a part that is."""
    total = int(before[high] - before[low])
    if total <= size or high - low == 1:
        yield low, high
        return
    count = min(high - low, -(-total // size))
    wanted = before[low] + total * np.arange(1, count) / count
    middles = (before[low:high] + before[low + 1 : high + 1]) / 2  # a part goes where its middle is
    cuts = low + np.searchsorted(middles, wanted)
    bounds = list(dict.fromkeys([low, *(int(cut) for cut in cuts), high]))
    if len(bounds) == 2:
        bounds.insert(1, (low + high) // 2)
    for group in pairwise(bounds):
        yield from cut_evenly(*group, before, size)


def joined(parts: Sequence[Unit], groups: Iterator[tuple[int, int]]) -> tuple[Unit, ...]:
    """One unit for each group; a part that is a group by itself stays what it is."""
    found = []
    for low, high in groups:
        kind = parts[low].kind if high == low + 1 else "chunk"
        found.append(Unit(parts[low].start, parts[high - 1].end, kind))
    return tuple(found)
