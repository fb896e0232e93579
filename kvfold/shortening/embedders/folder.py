"""A folder of sentence-transformers, or a plain encoder of transformers: the mean, or the first, of its hidden states.

Read without code and without pickles of the folder. Vectors are computed in fp32, whose last bits depend on the CPU, so
a code may differ by one from machine to machine. Prompts that some models want in front of a text are not added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import ModelError
from kvfold.models.digest import weights_digest
from kvfold.shortening.base import Progress
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.embedders.files import digest_of, read, read_json

if TYPE_CHECKING:
    from kvfold.models.encoder import Encoder

Pooling = Literal["mean", "cls"]
_MEAN: Pooling = "mean"
_REVISION = 1  # raise when the same files give other vectors


@dataclass
class FolderEncoder:
    """One hidden state for a text: the mean over its tokens, or that of the first."""

    name: str
    digest: str
    folder: Path  # of the encoder itself
    pooling: Pooling
    max_tokens: int | None

    @classmethod
    def load(cls, folder: Path, name: str) -> FolderEncoder:
        root, pooling = _modules(folder)
        limit = read_json(root, "sentence_bert_config.json", {}).get("max_seq_length")
        method = f"folder {_REVISION} {pooling} {limit}"
        files = [weights_digest(root).encode(), read(root, "config.json"), read(root, "tokenizer.json")]
        return cls(name, digest_of(method, *files), root, pooling, limit)

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        rows = []
        for done, text in enumerate(texts, 1):
            rows.append(self._row(text))
            if progress is not None:
                progress(done, len(texts))
        return encode_unit(np.stack(rows)) if rows else np.zeros((0, 1), dtype=np.int8)

    def _row(self, text: str) -> NDArray[np.float64]:
        hidden_TD = self._encoder.hidden(text.encode("utf-8", "replace").decode()).double().numpy()
        row: NDArray[np.float64] = hidden_TD[0] if self.pooling == "cls" else hidden_TD.mean(0)
        return row if text.strip() else np.zeros_like(row)

    @cached_property
    def _encoder(self) -> Encoder:
        from kvfold.models.encoder import Encoder  # here: transformers takes seconds to import

        return Encoder(self.folder, self.max_tokens)


def _modules(folder: Path) -> tuple[Path, Pooling]:
    """Where the encoder of a folder is, and how its states become one."""
    root, pooling = folder, _MEAN
    for module in read_json(folder, "modules.json", []):
        kind, path = str(module["type"]).rpartition(".")[2], folder / module["path"]
        if kind == "Transformer":
            root = path
        elif kind == "Pooling":
            pooling = _pooling(path)
        elif kind != "Normalize":
            raise ModelError(f"{folder} has a module {kind}; kvfold runs Transformer, Pooling and Normalize")
    return root, pooling


def _pooling(folder: Path) -> Pooling:
    """`pooling_mode_mean_tokens: true` and its like, or `pooling_mode: mean`."""
    facts = read_json(folder, "config.json", {})
    modes = [key.split("_")[2] for key, is_on in facts.items() if key.startswith("pooling_mode_") and is_on]
    modes += [facts["pooling_mode"]] if "pooling_mode" in facts else []
    if modes not in (["mean"], ["cls"]):
        raise ModelError(f"{folder} pools by {', '.join(map(str, modes))}; kvfold pools by mean or cls")
    return "cls" if modes == ["cls"] else "mean"
