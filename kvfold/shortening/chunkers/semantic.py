"""`semantic`: sentences that go on with one topic are a unit; it ends where neighbouring vectors part.

At every gap between two sentences the cosine of the windows before and behind it is taken. A gap whose cosine is a
local minimum and among the lowest is a boundary, as in TextTiling (Hearst 1997) with vectors in place of word counts.

    n parts   D dimensions
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Floats, Unit
from kvfold.shortening.chunkers.grouping import cut_evenly, is_alone, joined, tokens_before
from kvfold.shortening.embedders.codes import SCALE, encode_unit
from kvfold.shortening.tokens import TokenOffsets

_BLOCK = 2048  # gaps at once, so that sums of long texts need little memory


@register("units", "semantic")
@dataclass(frozen=True)
class Semantic(Chunker):
    """Sentences of one topic, at most `size` tokens: units end where the vectors of `window` sentences part.

    Boundaries are local minima among the lowest `share` of cosines. Headings and code stand alone.
    """

    size: int = 256
    window: int = 3
    share: float = 0.3

    def validate(self) -> str | None:
        if self.size < 1 or self.window < 1:
            return f"size and window are at least 1, not {self.size} and {self.window}"
        return None if 0 < self.share <= 1 else f"share is above 0 and at most 1, not {self.share:g}"

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        before = tokens_before(parts, tokens)
        is_first = boundaries(embedder.codes([text[part.start : part.end] for part in parts]), self.window, self.share)
        for number in range(1, len(parts)):
            is_first[number] |= is_alone(parts[number - 1]) or is_alone(parts[number])

        def groups() -> Iterator[tuple[int, int]]:
            low = 0
            for number in [*np.flatnonzero(is_first[1:]) + 1, len(parts)]:
                yield from cut_evenly(low, int(number), before, self.size)
                low = int(number)

        return joined(parts, groups()) if parts else ()


def boundaries(codes_nD: NDArray[np.int8], window: int, share: float) -> NDArray[np.bool_]:
    """[n]: parts that begin a topic; the first does not count."""
    found = np.zeros(len(codes_nD), dtype=bool)
    if len(codes_nD) < 3:
        return found
    gap = gap_cosines(codes_nD, window)
    padded = np.concatenate([[np.inf], gap, [np.inf]])
    is_minimum = (gap <= padded[:-2]) & (gap < padded[2:])  # of equal neighbours the last
    found[1:] = is_minimum & (gap <= np.quantile(gap, share, method="lower"))
    return found


def gap_cosines(codes_nD: NDArray[np.int8], window: int) -> Floats:
    """[n - 1]: the cosine of the `window` parts before each gap and those behind it, fewer at the ends."""
    blocks = range(1, len(codes_nD), _BLOCK)
    return np.concatenate([_cosines(codes_nD, low, min(low + _BLOCK, len(codes_nD)), window) for low in blocks])


def _cosines(codes_nD: NDArray[np.int8], low: int, high: int, window: int) -> Floats:
    """Gaps before parts `low` to `high`."""
    first, last = max(low - window, 0), min(high - 1 + window, len(codes_nD))
    sums = np.cumsum(codes_nD[first:last], axis=0, dtype=np.int32)
    sums = np.concatenate([np.zeros_like(sums[:1]), sums])
    at = np.arange(low, high) - first
    left = encode_unit((sums[at] - sums[np.maximum(at - window, 0)]).astype(np.float64))
    right = encode_unit((sums[np.minimum(at + window, len(sums) - 1)] - sums[at]).astype(np.float64))
    products = np.einsum("nd,nd->n", left.astype(np.int32), right.astype(np.int32))
    return np.asarray(products / SCALE**2, dtype=np.float64)
