"""Which facts a question recalls: BM25 and cosine, joined by reciprocal-rank fusion (Cormack et al. 2009), and recency.

    score = (1 / (60 + rank by BM25) + 1 / (60 + rank by cosine)) * (1 + 0.02 exp(-age / 30 d)) * importance

A fact without a word of the question has no rank by BM25. When no fact is near, nothing is recalled. A fact is near if
it speaks of whom the question names, and either its cosine reaches the embedder's threshold or it holds enough of the
question's words, counted by their idf. A fact has the ranks of those it superseded, where they are better.

    N facts   n those that are valid
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfold.memory.fact import Fact
from kvfold.memory.index import FactIndex
from kvfold.memory.question import THIRD_PERSON, AskedFor
from kvfold.memory.words import content_words
from kvfold.shortening.base import Floats
from kvfold.shortening.bm25 import bm25

NUM_RECALLED = 12
_K = 60
_MAX_WORDS = 64  # of a question that BM25 counts
_RECENCY, _RECENCY_SECONDS = 0.02, 30 * 86400.0
NEAR_SHARE = 0.5  # of the question's words, by idf
_NEAR_COSINES = {"potion": 0.6, "minilm": 0.6, "hashed": 0.5}
_NEAR_COSINE = 0.6  # of other embedders
_BESIDE = 0.75  # of that: facts that are shown beside near ones, if they share a word or reach it


@dataclass(frozen=True)
class Recalled:
    """A fact and how well it fits: the fused score, and what it was fused from."""

    fact: Fact
    score: float
    bm25: float
    cosine: float
    share: float  # of the question's words that the fact holds, by idf


def recall(
    index: FactIndex,
    asked: AskedFor,
    at: float,
    top: int = NUM_RECALLED,
    *,
    since: float | None = None,
    abstain: bool = True,
) -> list[Recalled]:
    """The best facts that were valid at a time, or from `since` to it, best first; empty if none is near the question
    and `abstain`."""
    valid_n = np.flatnonzero(index.valid_N(at, since))
    if not len(valid_n) or not (asked.words or asked.names):
        return []
    words = [form for forms in asked.words for form in forms]
    bm25_n = index.inherited_N(bm25(index.words, " ".join([*words, *content_words(asked.text)[:_MAX_WORDS]])))[valid_n]
    cosine_n = index.inherited_N(index.cosine_N(index.embedder.codes([asked.text])[0]))[valid_n]
    share_n = index.inherited_N(_shares(index, asked.words))[valid_n]
    threshold = _NEAR_COSINES.get(index.embedder.name, _NEAR_COSINE)
    named_n = index.inherited_N(_named(index, asked.names))[valid_n] > 0
    near_n = named_n & ((cosine_n >= threshold) | (share_n >= NEAR_SHARE))
    if abstain and not near_n.any():
        return []
    score_n = _fused(bm25_n, cosine_n)
    score_n *= 1 + _RECENCY * np.exp(-index.age_N(at)[valid_n] / _RECENCY_SECONDS)
    score_n *= index.importance_N[valid_n]
    order = np.lexsort((-score_n, ~near_n))  # near ones first
    shown_n = near_n | (bm25_n > 0) | (cosine_n >= _BESIDE * threshold)
    best = order[shown_n[order] | (not abstain)][:top]
    return [
        Recalled(index.facts[row], float(score), float(b), float(c), float(s))
        for row, score, b, c, s in zip(
            valid_n[best], score_n[best], bm25_n[best], cosine_n[best], share_n[best], strict=True
        )
    ]


def _fused(bm25_n: Floats, cosine_n: Floats) -> Floats:
    by_words = np.where(bm25_n > 0, 1 / (_K + _ranks(bm25_n)), 0.0)
    return by_words + 1 / (_K + _ranks(cosine_n))


def _ranks(score_n: Floats) -> Floats:
    """1 for the highest; equal scores share the first of their ranks."""
    higher_n = len(score_n) - np.searchsorted(np.sort(score_n), score_n, side="right")
    return higher_n.astype(np.float64) + 1


def _shares(index: FactIndex, words: Sequence[tuple[str, ...]]) -> Floats:
    """[N]: idf of the question's words that each fact holds, in any of their forms, over that of all its words; a word
    that no fact holds weighs most."""
    total, share_N = 0.0, np.zeros(len(index))
    for forms in words:
        held_N = index.words.holds_N(forms)
        count = int(held_N.sum())
        weight = math.log(1 + (len(index) - count + 0.5) / (count + 0.5))
        total += weight
        share_N += weight * held_N
    return share_N / total if words else np.ones(len(index))


def _named(index: FactIndex, names: frozenset[str]) -> Floats:
    """[N]: 1 for a fact that speaks of whom the question names, or of he, she or it; who asks for nobody means all."""
    if not names:
        return np.ones(len(index))
    return index.words.holds_N(names | THIRD_PERSON).astype(np.float64)
