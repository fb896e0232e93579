"""`graph`: the sentences that say most of what a text says, without a question (after arXiv:2604.23277).

Sentences are nodes; edges join mutual nearest neighbours by their vectors, and sentences that stand near each other.

    N units
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Bools, Floats, Selector, Task
from kvfold.shortening.chunkers.grouping import is_alone, paragraphs
from kvfold.shortening.clusters import clusters
from kvfold.shortening.embedders.codes import cosines
from kvfold.shortening.keyphrases import phrase_weights
from kvfold.shortening.sentence_graph import SentenceGraph, segments

_DAMPING = 0.85
_SHORT = 8  # tokens
_PHRASES = 100


@register(
    "selector",
    "graph",
    paper="arXiv:2604.23277",
    cost="1024·D for each unit",
    published="differs: no question, no score for cycles; leads, keyphrases and density count, too",
)
@dataclass(frozen=True)
class Graph(Selector):
    """Question-free: central sentences of a graph of sentences, representative of their topic or bridging two.

    worth = (g + 1 if it leads a paragraph + weight of its keyphrases + idf of its words for each token) / 2, where g =
    0.5 centrality (PageRank over mutual nearest neighbours and neighbours in the text) + 0.3 cosine to the mean of its
    cluster + 0.2 largest cosine to the mean of another cluster; each is scaled to 0..1. A sentence is worth less the
    more of its words stay already, and stays once if the text repeats it.
    """

    neighbours: int = 8
    near: int = 2
    near_weight: float = 0.3

    avoids_repeats: ClassVar[bool] = True

    def validate(self) -> str | None:
        if self.neighbours < 1:
            return f"neighbours is at least 1, not {self.neighbours}"
        return None if 0 <= self.near_weight <= 1 else f"near_weight is from 0 to 1, not {self.near_weight:g}"

    def worth(self, task: Task) -> Floats:
        told_N = _scaled(_density(task)) + _scaled(phrase_weights(task, _PHRASES)) + _leads(task)
        found_N = [np.zeros(0)]
        for low, high in segments(len(task.units)):
            codes = task.codes_ND[low:high]
            label, centres = clusters(codes)
            to_centre = cosines(codes, centres)
            own = to_centre[np.arange(len(codes)), label]
            to_centre[np.arange(len(codes)), label] = -1.0
            bridge = to_centre.max(1) if len(centres) > 1 else np.zeros(len(codes))
            graph = SentenceGraph.of(codes, self.neighbours, self.near, self.near_weight)
            central = graph.rank(np.full(len(codes), 1.0), _DAMPING)
            in_graph = 0.5 * _scaled(central) + 0.3 * _scaled(own) + 0.2 * _scaled(bridge)
            found_N.append(0.5 * (in_graph + told_N[low:high]))
            if task.progress is not None:
                task.progress(high, len(task.units))
        return np.concatenate(found_N)


def _leads(task: Task) -> Bools:
    """[N]: the first unit of each paragraph that is neither heading nor code."""
    found_N = np.zeros(len(task.units), dtype=bool)
    for low, high in paragraphs(task.text, task.units):
        found_N[[unit for unit in range(low, high) if not is_alone(task.units[unit])][:1]] = True
    return found_N


def _density(task: Task) -> Floats:
    """[N]: idf of the distinct words of a unit for each of its tokens; short units are no better for it."""
    index = task.words
    return index.sums(index.weights()[index.ids_W]) / np.maximum(task.num_tokens_N, _SHORT)


def _scaled(value: Floats) -> Floats:
    """To 0..1; all 0 where all are alike."""
    low, high = float(value.min(initial=0.0)), float(value.max(initial=0.0))
    return (value - low) / (high - low) if high > low else np.zeros(len(value))
