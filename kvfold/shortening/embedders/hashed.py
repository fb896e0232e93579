"""TF-IDF of the text itself: a vector without a download, words hashed into a fixed number of dimensions."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Progress
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.word_index import words_of

_BATCH = 1024  # texts whose rows are held at once
_STEPS = 1 << 12  # to which weights are rounded


@dataclass
class HashedTfIdf:
    """tf * idf, rounded; each word is one of `num_dims` dimensions, with a sign, by its CRC-32.

    The first texts it sees are the document that idf counts in; a question comes later.
    """

    num_dims: int = 1024
    name: str = field(default="tfidf", init=False)
    digest: str = field(default="3", init=False)
    _idf: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _rare: float = field(default=1.0, init=False, repr=False)  # of a word that the document lacks

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        counts = [Counter(words_of(text)) for text in texts]
        if not self._idf:
            self._fit(counts)
        found = np.zeros((len(texts), self.num_dims), dtype=np.int8)
        for low in range(0, len(texts), _BATCH):
            found[low : low + _BATCH] = encode_unit(self._rows(counts[low : low + _BATCH]))
        return found

    def _rows(self, counts: Sequence[Counter[str]]) -> NDArray[np.int64]:
        rows_ND = np.zeros((len(counts), self.num_dims), dtype=np.int64)
        for row, count in enumerate(counts):
            for word, times in count.items():
                value = zlib.crc32(word.encode("utf-8", "replace"))
                weight = round(_STEPS * (1 + math.log(times)) * self._idf.get(word, self._rare))
                rows_ND[row, value % self.num_dims] += weight if value & 0x80000000 else -weight
        return rows_ND

    def _fit(self, counts: Sequence[Counter[str]]) -> None:
        held = Counter(word for count in counts for word in count)
        self._idf = {word: math.log((1 + len(counts)) / (1 + times)) + 1 for word, times in held.items()}
        self._rare = math.log(1 + len(counts)) + 1
