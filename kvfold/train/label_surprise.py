"""Texts and surprises of a file of labels, for `train-scorer --labels`.

A replay score with `surprise` (`kvzip(surprise=2)`) counts a query by the surprise of the token that it is about to
repeat. By default this is the model's own surprise with all of the text before it. Labels put another teacher's in its
place: a larger model's, or that of a compressed cache, which is surprised by what it has lost too. LongPPL
(arXiv:2410.23771) tells key tokens by how much a cut context lowers their probability; here the surprise alone counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import FileError, InputError
from kvfold.plurals import counted
from kvfold.train.calibration_data import length_advice
from kvfold.train.label_format import Labels, vocabulary_digest
from kvfold.train.traces import MIN_LEN

DEFAULT_TEACHER = "kvzip(surprise=2)"


class SurprisingText(NamedTuple):
    """Token ids, and the surprise -ln p of each in nats; inf where there is no label."""

    token_ids: list[int]
    surprise_T: Tensor


def labelled_texts(labels: Labels, tokenizer: Any, count: int, length: int) -> list[SurprisingText]:
    """Pieces of `length` tokens of the labelled texts, evenly spaced, `count` in all or as many as there are."""
    if labels.header.tokenizer != vocabulary_digest(tokenizer):
        model = labels.header.model
        raise FileError(f"the labels are of another tokenizer, that of {model}; label texts with this model's")
    surprise_T = torch.full(labels.token_ids_T.shape, torch.inf)
    surprise_T[labels.rows.position_N] = -labels.rows.token_logprobs_N
    offsets = labels.text_offsets.tolist()
    begins = [at for i, start in enumerate(offsets[:-1]) for at in range(start, offsets[i + 1] - length + 1, length)]
    if len(begins) < 2 or length < MIN_LEN:
        raise InputError(
            f"the labelled texts have {counted(len(begins), 'piece')} of {counted(length, 'token')} (--length), and 2 "
            f"of at least {MIN_LEN} are needed; {length_advice(labels.text_offsets.diff().tolist())}"
        )
    ids = labels.token_ids_T.tolist()
    chosen = begins[:: max(1, len(begins) // count)][:count]
    return [SurprisingText(ids[at : at + length], surprise_T[at : at + length]) for at in chosen]
