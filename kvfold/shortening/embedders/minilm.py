"""all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957; trained by sentence-transformers) by onnxruntime.

It is not the default: kernels of different CPU families round differently, so a code may differ by one from machine to
machine, and it is three orders of magnitude slower than static vectors. Weights are int8, arithmetic is fp32. Texts are
encoded one at a time on one thread: batches are no faster there, and a vector depends on its text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvfold.errors import MissingExtra, ModelError
from kvfold.shortening.base import Progress
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.embedders.files import digest_of, read, tokenizer_of

MAX_TOKENS = 256  # of a text; the rest is not read
_NUM_DIMS = 384
_REVISION = 1  # raise when the same files give other vectors


@dataclass
class MiniLm:
    """The mean of the last hidden states of a text."""

    name: str
    digest: str
    folder: Path
    tokenizer: Tokenizer = field(repr=False)
    content: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, name: str) -> MiniLm:
        weights, tokenizer = read(folder, "model.onnx"), read(folder, "tokenizer.json")
        found = tokenizer_of(folder, tokenizer)
        found.enable_truncation(MAX_TOKENS)
        return cls(name, digest_of(f"minilm {_REVISION}", weights, tokenizer), folder, found, weights)

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        rows = []
        for done, text in enumerate(texts, 1):
            rows.append(self._mean(text))
            if progress is not None:
                progress(done, len(texts))
        return encode_unit(np.stack(rows)) if rows else np.zeros((0, _NUM_DIMS), dtype=np.int8)

    def _mean(self, text: str) -> NDArray[np.float64]:
        if not text.strip():
            return np.zeros(_NUM_DIMS)
        ids = np.array([self.tokenizer.encode(text.encode("utf-8", "replace").decode()).ids], dtype=np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (hidden_1TD,) = self._session.run(None, inputs)
        mean_D: NDArray[np.float64] = hidden_1TD[0].mean(0, dtype=np.float64)
        return mean_D

    @cached_property
    def _session(self) -> Any:
        ort = _onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            return ort.InferenceSession(self.content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises nothing narrower
            reason = str(error).split("\n", 1)[0]
            raise ModelError(f"{self.folder / 'model.onnx'} is damaged ({reason}); pull {self.name} anew") from error


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra('the embedder minilm needs onnxruntime; run: pip install "kvfold[shorten]"') from error
    return onnxruntime
