"""The words of facts, to which further facts are added, with what every question needs computed once.

N facts   W words, each once for every fact that holds it   V words of the vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from kvfold.shortening.base import Bools
from kvfold.shortening.word_index import Integers, WordIndex


class FactWords(WordIndex):
    """A word index that grows by making another one; both share one vocabulary."""

    @classmethod
    def empty(cls) -> FactWords:
        nothing = np.zeros(0, dtype=np.int64)
        return cls({}, nothing, nothing, np.zeros(1, dtype=np.int64))

    def with_texts(self, texts: Sequence[str]) -> FactWords:
        new = WordIndex.of(texts)
        known = self.vocabulary
        ids_V = np.array([known.setdefault(word, len(known)) for word in new.vocabulary], dtype=np.int64)
        ids_W = np.concatenate([self.ids_W, ids_V[new.ids_W]])
        times_W = np.concatenate([self.times_W, new.times_W])
        return FactWords(known, ids_W, times_W, np.concatenate([self.first, self.first[-1] + new.first[1:]]))

    @cached_property
    def _postings(self) -> tuple[Integers, Integers, Integers]:
        """[W] facts and [W] counts, ordered by word, and [V + 1] where each word begins."""
        order_W = np.argsort(self.ids_W, kind="stable")
        fact_W = np.repeat(np.arange(len(self)), np.diff(self.first))
        starts = np.searchsorted(self.ids_W[order_W], np.arange(len(self.vocabulary) + 1))
        return fact_W[order_W], self.times_W[order_W], starts

    @cached_property
    def _length_N(self) -> Integers:
        return super().sums(self.times_W)

    @cached_property
    def _weight_V(self) -> Integers:
        return super().weights()

    def weights(self) -> Integers:
        return self._weight_V

    def sums(self, values_W: Integers) -> Integers:
        return self._length_N if values_W is self.times_W else super().sums(values_W)

    def holders(self, word: int) -> tuple[Integers, Integers]:
        fact_W, times_W, starts = self._postings
        held = slice(starts[word], starts[word + 1])
        return fact_W[held], times_W[held]

    def holds_N(self, words: Iterable[str]) -> Bools:
        """Whether each fact holds one of the words."""
        found_N = np.zeros(len(self), dtype=np.bool_)
        for word in words:
            if word in self.vocabulary:
                found_N[self.holders(self.vocabulary[word])[0]] = True
        return found_N
