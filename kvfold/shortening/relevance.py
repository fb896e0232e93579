"""How much units have to do with a question: by its words, by its vector, and by units that have.

What answers a question often shares no word with it: it stands behind the sentence that does, or follows from one in
another place. So BM25 and cosine, each scaled to 0..1, are where personalised PageRank over the graph of units begins.

    N units
"""

from __future__ import annotations

import numpy as np

from kvfold.shortening.base import Floats, Task
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.embedders.codes import cosines
from kvfold.shortening.sentence_graph import SentenceGraph, segments

_DAMPING = 0.7
_LEAST = 0.001  # of every unit: without a word in common those that are central stay


def relevance(task: Task, question: str) -> Floats:
    """[N]: larger is nearer to the question."""
    by_vector_N = cosines(task.codes_ND, task.embedder.codes([question]))[:, 0]
    start_N = _scaled(bm25(task.words, question)) + _scaled(np.maximum(by_vector_N, 0.0)) + _LEAST
    found_N = [np.zeros(0)]
    for low, high in segments(len(task.units)):
        found_N.append(SentenceGraph.of(task.codes_ND[low:high]).rank(start_N[low:high], _DAMPING))
        if task.progress is not None:
            task.progress(high, len(task.units))
    return np.concatenate(found_N)


def _scaled(value_N: Floats) -> Floats:
    """The largest is 1."""
    most = float(value_N.max(initial=0.0))
    return value_N / most if most else value_N
