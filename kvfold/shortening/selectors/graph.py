"""`graph`: the sentences that say most of what a text says, without a question (after arXiv:2604.23277).

Sentences are nodes; edges join mutual nearest neighbours by their vectors, and sentences that stand near each other.

    n sentences of a segment   D dimensions   E edges   C clusters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvfold.policy.registry import register
from kvfold.shortening.base import Floats, Selector, Task
from kvfold.shortening.clusters import Codes, clusters
from kvfold.shortening.embedders.codes import SCALE, cosines
from kvfold.shortening.greedy import segments

_DAMPING = 0.85
_ROUNDS = 50  # of PageRank, at most


@register(
    "selector",
    "graph",
    paper="arXiv:2604.23277",
    cost="1024·D for each unit",
    published="differs: no question, no score for cycles",
)
@dataclass(frozen=True)
class Graph(Selector):
    """Question-free: central sentences of a graph of sentences, representative of their topic or bridging two.

    worth = 0.5 centrality (PageRank over mutual nearest neighbours and neighbours in the text) + 0.3 cosine to the mean
    of its cluster + 0.2 largest cosine to the mean of another cluster, each scaled to 0..1; a sentence that repeats one
    that stays is worth less.
    """

    neighbours: int = 8
    near: int = 2
    near_weight: float = 0.3

    avoids_repeats: ClassVar[bool] = True

    def validate(self) -> str | None:
        return None if self.neighbours >= 1 else "neighbours is at least 1"

    def worth(self, task: Task) -> Floats:
        parts = []
        for low, high in segments(len(task.units)):
            codes = task.codes_ND[low:high]
            label, centres = clusters(codes)
            to_centre = cosines(codes, centres)
            own = to_centre[np.arange(len(codes)), label]
            to_centre[np.arange(len(codes)), label] = -1.0
            bridge = to_centre.max(1) if len(centres) > 1 else np.zeros(len(codes))
            parts.append(0.5 * _scaled(self._centrality(codes)) + 0.3 * _scaled(own) + 0.2 * _scaled(bridge))
            if task.progress is not None:
                task.progress(high, len(task.units))
        return np.concatenate(parts) if parts else np.zeros(0)

    def similarity(self, task: Task, low: int, high: int) -> Floats:
        codes = task.codes_ND[low:high]
        return cosines(codes, codes)

    def _centrality(self, codes: Codes) -> Floats:
        """PageRank; sums run edge by edge in one order, so that they are alike on every machine."""
        n = len(codes)
        source, target, weight = self._edges(codes)
        out = np.bincount(source, weight, n)
        share = weight / out[source]
        rank = np.full(n, 1.0 / n)
        for _ in range(_ROUNDS):
            moved = np.bincount(target, rank[source] * share, n)
            lost = float(sum(rank[out == 0]))
            after = (1 - _DAMPING + _DAMPING * lost) / n + _DAMPING * moved
            if float(np.abs(after - rank).max()) < 1e-10:
                break
            rank = after
        return rank

    def _edges(self, codes: Codes) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Both directions of every edge: mutual nearest neighbours by cosine², and neighbours in the text."""
        n = len(codes)
        similar = cosines(codes, codes)
        np.fill_diagonal(similar, -1.0)
        count = min(self.neighbours, n - 1)
        key = np.rint(similar * SCALE**2) * n - np.arange(n)  # of two that are as near, the earlier one
        is_near = np.zeros((n, n), dtype=bool)
        if count:
            np.put_along_axis(is_near, np.argpartition(-key, count - 1, axis=1)[:, :count], True, axis=1)
        weight = np.where(is_near & is_near.T, np.maximum(similar, 0.0) ** 2, 0.0)
        for step in range(1, min(self.near, n - 1) + 1):
            at = np.arange(n - step)
            weight[at, at + step] += self.near_weight
            weight[at + step, at] += self.near_weight
        source, target = np.nonzero(weight)
        return source, target, weight[source, target]


def _scaled(value: Floats) -> Floats:
    """To 0..1; all 0 where all are alike."""
    low, high = float(value.min()), float(value.max())
    return (value - low) / (high - low) if high > low else np.zeros(len(value))
