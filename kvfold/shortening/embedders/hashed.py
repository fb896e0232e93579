"""TF-IDF of the text itself: a vector without a download, words hashed into a fixed number of dimensions."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Progress
from kvfold.shortening.embedders.codes import encode_unit

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Lower-case words; a plural s goes, so that a question finds both."""
    return [word[:-1] if len(word) > 3 and word[-1] == "s" else word for word in _WORD.findall(text.lower())]


@dataclass
class HashedTfIdf:
    """tf * idf; each word is one of `num_dims` dimensions, with a sign, by its CRC-32.

    The first texts it sees are the document that idf counts in; a question comes later.
    """

    num_dims: int = 1024
    name: str = field(default="tfidf", init=False)
    digest: str = field(default="1", init=False)
    _idf: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _rare: float = field(default=1.0, init=False, repr=False)  # of a word that the document lacks

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        counts = [Counter(words_of(text)) for text in texts]
        if not self._idf:
            self._fit(counts)
        rows_ND = np.zeros((len(texts), self.num_dims), dtype=np.float32)
        for row, count in enumerate(counts):
            for word, times in count.items():
                value = zlib.crc32(word.encode())
                weight = (1 + math.log(times)) * self._idf.get(word, self._rare)
                rows_ND[row, value % self.num_dims] += weight if value & 0x80000000 else -weight
        return encode_unit(rows_ND)

    def _fit(self, counts: Sequence[Counter[str]]) -> None:
        held = Counter(word for count in counts for word in count)
        self._idf = {word: math.log((1 + len(counts)) / (1 + times)) + 1 for word, times in held.items()}
        self._rare = math.log(1 + len(counts)) + 1
