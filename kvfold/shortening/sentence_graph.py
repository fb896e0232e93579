"""A graph of units: mutual nearest neighbours by their vectors, and units that stand near each other in the text.

Sums run edge by edge in one order, so that they are alike on every machine.

    n units of a segment   E edges   D dimensions
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Floats
from kvfold.shortening.embedders.codes import SCALE, cosines

SEGMENT = 1024  # units that are compared with each other: time and memory grow with a long text, not with its square
_REPEAT = 0.98  # units whose cosine is above say the same: an edge would only pass worth to and fro
_ROUNDS = 50  # at most


def segments(num_units: int) -> list[tuple[int, int]]:
    """Bounds of segments of nearly equal length."""
    count = max(1, -(-num_units // SEGMENT))
    return list(pairwise(num_units * number // count for number in range(count + 1)))


@dataclass(frozen=True)
class SentenceGraph:
    """Both directions of every edge."""

    num_units: int
    source_E: NDArray[np.int64]
    target_E: NDArray[np.int64]
    weight_E: Floats

    @classmethod
    def of(
        cls, codes_nD: NDArray[np.int8], neighbours: int = 8, near: int = 2, near_weight: float = 0.3
    ) -> SentenceGraph:
        """Mutual nearest neighbours by cosine², and units up to `near` away in the text."""
        n = len(codes_nD)
        similar_nn = cosines(codes_nD, codes_nD)
        similar_nn[similar_nn > _REPEAT] = 0.0
        np.fill_diagonal(similar_nn, -1.0)
        count = min(neighbours, n - 1)
        key = np.rint(similar_nn * SCALE**2) * n - np.arange(n)  # of two that are as near, the earlier one
        is_near = np.zeros((n, n), dtype=bool)
        if count > 0:
            np.put_along_axis(is_near, np.argpartition(-key, count - 1, axis=1)[:, :count], True, axis=1)
        weight_nn = np.where(is_near & is_near.T, np.maximum(similar_nn, 0.0) ** 2, 0.0)
        for step in range(1, min(near, n - 1) + 1):
            at = np.arange(n - step)
            weight_nn[at, at + step] += near_weight
            weight_nn[at + step, at] += near_weight
        source, target = np.nonzero(weight_nn)
        return cls(n, source, target, weight_nn[source, target])

    def rank(self, start_n: Floats, damping: float) -> Floats:
        """[n]: PageRank that begins again from `start` (personalised PageRank); its sum is that of `start`."""
        total = float(start_n.sum())
        out_n = np.bincount(self.source_E, self.weight_E, self.num_units)
        share_E = self.weight_E / out_n[self.source_E]
        rank_n = start_n
        for _ in range(_ROUNDS):
            moved_n = np.bincount(self.target_E, rank_n[self.source_E] * share_E, self.num_units)
            lost = float(sum(rank_n[out_n == 0])) / total if total else 0.0  # by units without an edge
            after_n = (1 - damping + damping * lost) * start_n + damping * moved_n
            if float(np.abs(after_n - rank_n).max(initial=0.0)) < 1e-10 * max(total, 1e-10):
                break
            rank_n = after_n
        return rank_n
