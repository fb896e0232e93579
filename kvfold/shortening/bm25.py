"""BM25 of units against a question (Robertson and Zaragoza 2009), with the idf of Lucene, which is never negative."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvfold.shortening.base import Floats
from kvfold.shortening.embedders.hashed import words_of

_K1, _B = 1.2, 0.75


def bm25(texts: Sequence[str], question: str) -> Floats:
    """[N]: the score of each text."""
    counts = [Counter(words_of(text)) for text in texts]
    lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
    mean = float(lengths.mean()) if len(lengths) else 1.0
    norm = _K1 * (1 - _B + _B * lengths / (mean or 1.0))
    score = np.zeros(len(texts))
    for word in dict.fromkeys(words_of(question)):
        times = np.array([count[word] for count in counts], dtype=np.float64)
        held = int((times > 0).sum())
        idf = round(math.log(1 + (len(texts) - held + 0.5) / (held + 0.5)), 9)
        score += idf * times * (_K1 + 1) / (times + norm)
    return score


def reciprocal_ranks(scores: Sequence[Floats], k: int = 60) -> Floats:
    """Reciprocal-rank fusion: the sum of 1 / (k + rank) over several scores; texts that score alike rank alike."""
    total = np.zeros(len(scores[0]))
    for score in scores:
        ordered = np.sort(-np.round(score, 9))
        total += 1.0 / (k + 1 + np.searchsorted(ordered, -np.round(score, 9)))
    return total
