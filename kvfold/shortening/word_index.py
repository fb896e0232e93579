"""The words of units as numbers: what BM25 counts, and by which a unit is told from one that says the same.

N units   W words, each once for every unit that holds it   V words of the vocabulary
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NO_SPACES = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han: no spaces between words
WORD = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+")
_STEPS = 1000  # idf is rounded to whole numbers, whose sums are alike on every machine


def words_of(text: str) -> list[str]:
    """Lower-case words; a plural s goes, so that a question finds both. Of Chinese and Japanese every character."""
    return [word[:-1] if len(word) > 3 and word[-1] == "s" else word for word in WORD.findall(text.lower())]


@dataclass(frozen=True)
class WordIndex:
    """Distinct words of every unit, one unit after another."""

    vocabulary: dict[str, int]
    ids_W: Integers
    times_W: Integers
    first: Integers  # [N + 1]: where the words of each unit begin

    @classmethod
    def of(cls, texts: Sequence[str]) -> WordIndex:
        vocabulary: dict[str, int] = {}
        ids, times, first = [], [], [0]
        for text in texts:
            counts = Counter(words_of(text))
            ids.append(np.array([vocabulary.setdefault(word, len(vocabulary)) for word in counts], dtype=np.int64))
            times.append(np.fromiter(counts.values(), dtype=np.int64, count=len(counts)))
            first.append(first[-1] + len(counts))
        nothing = np.zeros(0, dtype=np.int64)
        return cls(vocabulary, np.concatenate([nothing, *ids]), np.concatenate([nothing, *times]), np.array(first))

    def __len__(self) -> int:
        return len(self.first) - 1

    def ids(self, unit: int) -> Integers:
        return self.ids_W[self.first[unit] : self.first[unit + 1]]

    def known_ids(self, text: str) -> list[int]:
        """Distinct words of another text that units hold, in its order."""
        return [self.vocabulary[word] for word in dict.fromkeys(words_of(text)) if word in self.vocabulary]

    def holders(self, word: int) -> tuple[Integers, Integers]:
        """Units that hold a word, and how often each does."""
        at = np.flatnonzero(self.ids_W == word)
        return np.searchsorted(self.first, at, side="right") - 1, self.times_W[at]

    def sums(self, values_W: Integers) -> Integers:
        """[N]: over the words of each unit."""
        total = np.concatenate([np.zeros(1, dtype=values_W.dtype), np.cumsum(values_W)])
        found: Integers = total[self.first[1:]] - total[self.first[:-1]]
        return found

    def weights(self) -> Integers:
        """[V]: idf of Lucene, which is never negative, in thousandths."""
        num_units, held_V = len(self), np.bincount(self.ids_W, minlength=len(self.vocabulary))
        by_count = {int(h): round(_STEPS * math.log(1 + (num_units - h + 0.5) / (h + 0.5))) for h in np.unique(held_V)}
        return np.array([by_count[int(held)] for held in held_V], dtype=np.int64)
