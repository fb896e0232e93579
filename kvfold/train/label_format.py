"""The file of labels: safetensors with the tokens of all texts, top-k log-probabilities, and what they come from.

metadata   "kvfold": JSON with the format, version, model, digest of its weights, digest of the tokenizer's
           vocabulary, policy and its fingerprint, topk, window, context and the names of the texts
tensors    token_ids int32 [T], text_offsets int64 [texts + 1], and those of `label_rows.NAMES`

T tokens of all texts   N labelled tokens   K labels of a token
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvfold.atomic_io import read_tensors, replacing
from kvfold.errors import FileError
from kvfold.policy.parse import parse
from kvfold.train.label_rows import NAMES, Rows, rows_of, tensors_of

FORMAT = "kvfold-labels-1"
_MAX_BYTES = 1 << 36
_DIGEST, _VERSION = re.compile("[0-9a-f]{64}"), re.compile(r"\d+\.\d+")
_ERROR = 2e-3  # absolute and relative, of the logs of topk_logprobs, which are fp16


@dataclass(frozen=True)
class LabelHeader:
    """What labels come from."""

    version: str
    model: str
    weights: str  # digest, with scaled rotary positions
    tokenizer: str  # digest of the vocabulary
    vocab_size: int
    policy: str
    fingerprint: str
    topk: int
    window: int
    context: int
    names: tuple[str, ...]  # of the texts

    @classmethod
    def of_json(cls, found: Any) -> LabelHeader:
        """ValueError, TypeError or LookupError if it is none."""
        values = {field.name: found[field.name] for field in fields(cls)}
        counts = {name: values.pop(name) for name in ("vocab_size", "topk", "window", "context")}
        names = values.pop("names")
        if not all(type(count) is int and 0 < count < 1 << 31 for count in counts.values()):
            raise ValueError("its header has a count that is none")
        if not all(type(text) is str for text in (*values.values(), *names)) or type(names) is not list:
            raise ValueError("its header has a text that is none")
        for name in ("weights", "tokenizer", "fingerprint"):
            if not _DIGEST.fullmatch(values[name]):
                raise ValueError(f"{name} in its header is no digest")
        if not _VERSION.match(values["version"]) or not values["model"]:
            raise ValueError("its header names no version of kvfold, or no model")
        parse(values["policy"])  # terms of plugins need not be known here
        return cls(**values, **counts, names=tuple(names))


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of texts, as `label` computes and `read_labels` reads them."""

    header: LabelHeader
    token_ids_T: Tensor  # int32
    text_offsets: Tensor  # int64: text i has the tokens from offset i to offset i + 1
    rows: Rows

    def write(self, path: Path) -> None:
        header = json.dumps({"format": FORMAT, **asdict(self.header)}, sort_keys=True)
        tensors = {"token_ids": self.token_ids_T, "text_offsets": self.text_offsets, **tensors_of(self.rows)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"kvfold": header})


def read_labels(path: str | Path) -> Labels:
    """A file of labels, checked throughout; FileError if anything is wrong with it."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FileError(f"{path} is larger than any file of labels; label fewer texts at a time")
        header, tensors = read_tensors(path, FORMAT)
        return _checked(LabelHeader.of_json(header), tensors)
    except OSError as error:
        raise FileError(f"the labels {path} cannot be read ({error.strerror}); write them with kvfold label") from None
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(
            f"{path} is no file of labels, or damaged ({reason}); write it again with kvfold label"
        ) from None


def _checked(header: LabelHeader, tensors: dict[str, Tensor]) -> Labels:
    if set(tensors) != {"token_ids", "text_offsets", *NAMES}:
        raise ValueError(f"it holds {', '.join(sorted(tensors)) or 'nothing'}")
    ids_T, offsets = tensors["token_ids"], tensors["text_offsets"]
    if ids_T.dtype != torch.int32 or ids_T.dim() != 1 or bool(((ids_T < 0) | (ids_T >= header.vocab_size)).any()):
        raise ValueError("token_ids are not those of its vocabulary")
    if offsets.dtype != torch.int64 or tuple(offsets.shape) != (len(header.names) + 1,):
        raise ValueError("text_offsets do not fit the names of its texts")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids_T) or bool((offsets.diff() < 0).any()):
        raise ValueError("text_offsets do not divide its tokens")
    rows = rows_of(tensors, header.topk, header.vocab_size, len(ids_T))
    _check_complete(rows, len(ids_T), offsets)
    _check_tokens(rows, ids_T)
    return Labels(header, ids_T, offsets, rows)


def _check_complete(rows: Rows, num_tokens: int, offsets: Tensor) -> None:
    """Every token has a label, but for the first of a text where none begins with a BOS token."""
    lacks_T = torch.ones(num_tokens, dtype=torch.bool)
    lacks_T[rows.position_N] = False
    num_lacking = int(lacks_T.sum())
    lacks_T[offsets[:-1][offsets.diff() > 0]] = False
    if not len(rows.position_N) or bool(lacks_T.any()):
        raise ValueError(f"{num_lacking} of its {num_tokens} tokens have no label")


def _check_tokens(rows: Rows, ids_T: Tensor) -> None:
    """The log-probability of a token that came is that of the top k, or lower than all of them."""
    logprobs_NK = rows.topk_logprobs_NK.float()
    is_token_NK = rows.topk_ids_NK == ids_T[rows.position_N].unsqueeze(1)
    expected_N = torch.where(is_token_NK, logprobs_NK, -torch.inf).amax(-1)
    most_N = torch.minimum(logprobs_NK[:, -1], rows.rest_logprobs_N)
    expected_N = torch.where(is_token_NK.any(-1), expected_N, torch.minimum(rows.token_logprobs_N, most_N))
    if not torch.allclose(rows.token_logprobs_N, expected_N, _ERROR, _ERROR):
        raise ValueError("token_logprobs contradict topk_logprobs")


def vocabulary_digest(tokenizer: Any) -> str:
    """What tells whether token ids of two tokenizers mean the same."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
