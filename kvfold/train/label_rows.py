"""Rows of labels: one for each labelled token. Nothing that comes from a file is trusted before `check_rows`.

N labelled tokens   K labels of a token
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = -65504.0  # the smallest fp16: what a log-probability of 0 is stored as
_MASS_ERROR = 0.02  # fp16 logs are off by up to 0.1 % near -2, 0.8 % near -16


class Rows(NamedTuple):
    """Row i predicts token `position_N[i]` of all texts, one after the other."""

    position_N: Tensor  # int64, ascending
    compressed_N: Tensor  # bool: whether the past in front of its window was cached under the policy
    topk_ids_NK: Tensor  # int32, the most likely first
    topk_logprobs_NK: Tensor  # fp16
    rest_logprobs_N: Tensor  # fp32: the log of the mass of all other tokens
    token_logprobs_N: Tensor  # fp32: of the token that came


NAMES = ("positions", "compressed", "topk_ids", "topk_logprobs", "rest_logprobs", "token_logprobs")
_DTYPES = (torch.int64, torch.bool, torch.int32, torch.float16, torch.float32, torch.float32)


def joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


def tensors_of(rows: Rows) -> dict[str, Tensor]:
    """By their names in a file."""
    return {name: column.contiguous() for name, column in zip(NAMES, rows, strict=True)}


def rows_of(tensors: Mapping[str, Tensor], topk: int, vocab_size: int, num_tokens: int) -> Rows:
    """The rows in a file; ValueError with what is wrong. LookupError if one is missing."""
    rows = Rows(*(tensors[name] for name in NAMES))
    for fault in _faults(rows, topk, vocab_size, num_tokens):
        raise ValueError(fault)
    return rows


def _faults(rows: Rows, topk: int, vocab_size: int, num_tokens: int) -> Iterator[str]:
    count = len(rows.position_N)
    for name, column, dtype in zip(NAMES, rows, _DTYPES, strict=True):
        shape = (count, topk) if name.startswith("topk") else (count,)
        if column.dtype != dtype or tuple(column.shape) != shape:
            yield f"{name} is {column.dtype} {list(column.shape)}, not {dtype} {list(shape)}"
    position_N, ids_NK = rows.position_N, rows.topk_ids_NK
    if bool((position_N.diff() <= 0).any()) or _outside(position_N, num_tokens):
        yield "positions do not ascend inside of the texts"
    if _outside(ids_NK, vocab_size):
        yield "topk_ids are outside of the vocabulary"
    if bool((ids_NK.sort(-1).values.diff(dim=-1) == 0).any()):
        yield "topk_ids hold a token twice"
    for name, column in zip(NAMES[3:], rows[3:], strict=True):
        if not bool(column.isfinite().all()) or bool((column > 0).any()):
            yield f"{name} are no finite logs of probabilities"
    logprobs_NK = rows.topk_logprobs_NK.float()
    if bool((logprobs_NK.diff(dim=-1) > 0).any()):
        yield "topk_logprobs are not sorted"
    mass_N = logprobs_NK.exp().sum(-1) + rows.rest_logprobs_N.exp()
    if bool(((mass_N - 1).abs() > _MASS_ERROR).any()):
        yield "probabilities of a row do not add up to 1"


def _outside(values: Tensor, end: int) -> bool:
    return bool(((values < 0) | (values >= end)).any())
