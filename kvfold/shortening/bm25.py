"""BM25 of units against a question (Robertson and Zaragoza 2009), with the idf of Lucene, which is never negative."""

from __future__ import annotations

import numpy as np

from kvfold.shortening.base import Floats
from kvfold.shortening.word_index import WordIndex

_K1, _B = 1.2, 0.75


def bm25(index: WordIndex, question: str) -> Floats:
    """[N]: the score of each unit, in thousandths of an idf."""
    length_N, weight_V = index.sums(index.times_W), index.weights()
    norm_N = _K1 * (1 - _B + _B * length_N / max(1.0, float(length_N.sum()) / max(1, len(index))))
    score_N = np.zeros(len(index))
    for word in index.known_ids(question):
        unit, times = index.holders(word)
        score_N[unit] += weight_V[word] * times * (_K1 + 1) / (times + norm_N[unit])
    return score_N
