"""Vectors of facts: static ones (potion) where they were pulled, else hashed words and trigrams.

A vector is kept with its fact, so the embedder must give the same one whatever else it has seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import PolicyError
from kvfold.models.pull import manifest
from kvfold.models.pull.pull import model_folder
from kvfold.shortening.base import Embedder, Progress
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.word_index import words_of

NAMES = ("auto", "potion", "minilm", "hashed")
_WORD_WEIGHT, _TRIGRAM_WEIGHT = 4, 1
_BATCH = 2048  # texts that are counted at once


@dataclass
class HashedTrigrams:
    """Words and character trigrams, each one of `num_dims` dimensions, with a sign, by its CRC-32.

    Trigrams make lives, lived and living near each other.
    """

    num_dims: int = 512
    name: str = field(default="hashed", init=False)
    digest: str = field(default="1", init=False)

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        found = np.zeros((len(texts), self.num_dims), dtype=np.int8)
        for low in range(0, len(texts), _BATCH):
            found[low : low + _BATCH] = encode_unit(self._counts(texts[low : low + _BATCH]))
        return found

    def _counts(self, texts: Sequence[str]) -> NDArray[np.int64]:
        rows_ND = np.zeros((len(texts), self.num_dims), dtype=np.int64)
        for row, text in enumerate(texts):
            for piece, weight in _pieces(text):
                value = zlib.crc32(piece.encode("utf-8", "replace"))
                rows_ND[row, value % self.num_dims] += weight if value & 0x80000000 else -weight
        return rows_ND


def _pieces(text: str) -> Iterator[tuple[str, int]]:
    for word in dict.fromkeys(words_of(text)):
        yield word, _WORD_WEIGHT
        marked = f"<{word}>"
        for at in range(len(marked) - 2):
            yield marked[at : at + 3], _TRIGRAM_WEIGHT


def fact_embedder(name: str = "auto") -> Embedder:
    """The embedder of a name, or of the path of a folder."""
    if name == "auto":
        name = "potion" if manifest.is_complete(model_folder("potion-base-8m")) else "hashed"
    if name == "hashed":
        return HashedTrigrams()
    if name == "tfidf":
        raise PolicyError(f"tfidf depends on the other texts, and facts come one by one; use {', '.join(NAMES)}")
    return load_embedder(name)


def identity(embedder: Embedder) -> str:
    """What a vector is kept with."""
    return f"{embedder.name}:{embedder.digest}"
