"""Yes or no by log-probability: the first tokens of both words in their spellings, and how they share the mass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.models.special_tokens import TextEncoder

_YES, _NO = ("Yes", "yes", " Yes", " yes"), ("No", "no", " No", " no")


def yes_no_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """First tokens of yes and of no; a token that begins both says neither. One list is empty if they cannot be told
    apart."""
    encoder = TextEncoder(tokenizer)
    yes, no = ({encoder.ids(word)[0] for word in words} for words in (_YES, _NO))
    return sorted(yes - no), sorted(no - yes)


def yes_probabilities(logits_BV: Tensor, yes: list[int], no: list[int]) -> Tensor:
    """p(yes) / (p(yes) + p(no)) of each row, fp64 on the CPU."""
    logprob_BV = logits_BV.log_softmax(-1)
    margin_B = logprob_BV[:, yes].logsumexp(-1) - logprob_BV[:, no].logsumexp(-1)
    return torch.sigmoid(margin_B).double().cpu()
