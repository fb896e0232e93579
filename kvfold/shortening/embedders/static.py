"""Static word vectors (model2vec): a text is the mean of the vectors of its tokens.

The table is rounded to 16-bit integers once, so that sums are exact and vectors are the same on every machine.

    V tokens of the vocabulary   D dimensions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from kvfold.errors import ModelError
from kvfold.shortening.base import Progress
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.embedders.files import digest_of, read
from kvfold.shortening.embedders.word_ids import WordIds

_REVISION = 1  # raise when the same files give other vectors
_BATCH = 2048  # texts, and tokens of one text, that are summed at once
_FRACTION = 256  # means are rounded to this part of a step of the table


@dataclass
class StaticVectors:
    """Vectors of a folder of model2vec, such as potion-base-8M."""

    name: str
    digest: str
    table_VD: NDArray[np.int16] = field(repr=False)
    words: WordIds = field(repr=False)

    @classmethod
    def load(cls, folder: Path, name: str) -> StaticVectors:
        weights, tokenizer = read(folder, "model.safetensors"), read(folder, "tokenizer.json")
        words = WordIds.of(folder, tokenizer)
        table_VD = _table(folder, weights)
        if words.vocab_size > len(table_VD):
            raise ModelError(
                f"{folder} is damaged: {words.vocab_size} tokens and {len(table_VD)} vectors; copy it anew"
            )
        return cls(name, digest_of(f"static {_REVISION}", weights, tokenizer), table_VD, words)

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        found = np.zeros((len(texts), self.table_VD.shape[1]), dtype=np.int8)
        for low in range(0, len(texts), _BATCH):
            found[low : low + _BATCH] = encode_unit(self._means(texts[low : low + _BATCH]))
        return found

    def _means(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """[N, D]: the mean over the tokens of each text, in steps of 1 / _FRACTION."""
        total_ND = np.zeros((len(texts), self.table_VD.shape[1]), dtype=np.int64)
        count_N1 = np.ones((len(texts), 1))
        for row, text in enumerate(texts):
            ids = self.words.ids(text)
            count_N1[row] = max(1, len(ids))
            for low in range(0, len(ids), _BATCH):
                total_ND[row] += np.add.reduce(self.table_VD.take(ids[low : low + _BATCH], 0), axis=0, dtype=np.int32)
        return np.rint(total_ND * (_FRACTION / count_N1)).astype(np.int64)


def _table(folder: Path, content: bytes) -> NDArray[np.int16]:
    """[V, D]: the vectors times a power of two, rounded, the largest below 2**14."""
    try:
        tensors = safetensors.numpy.load(content)
    except SafetensorError as error:
        raise ModelError(f"{folder / 'model.safetensors'} is damaged ({error}); copy or pull it anew") from error
    if list(tensors) != ["embeddings"] or tensors["embeddings"].ndim != 2:
        raise ModelError(
            f"{folder} holds {', '.join(sorted(tensors))} and no table of embeddings alone, as potion-base-8M does"
        )
    table_VD = tensors["embeddings"].astype(np.float32)
    if not np.isfinite(table_VD).all():
        raise ModelError(
            f"{folder / 'model.safetensors'} is damaged (not all numbers are finite); copy or pull it anew"
        )
    _, exponent = np.frexp(np.abs(table_VD).max(initial=0.0))
    rounded: NDArray[np.int16] = np.rint(np.ldexp(table_VD, 14 - exponent)).astype(np.int16)
    return rounded
