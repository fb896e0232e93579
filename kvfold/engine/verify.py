"""Verification of drafts (speculative decoding): logits of drafted tokens, and how many of them are accepted.

T tokens of one sequence   V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass


class Verified:
    """Drafted tokens of one sequence after their pass: accepted ones enter the KV cache, rejected ones do not.

    Valid until the next pass over the sequence, which overwrites rejected tokens.
    """

    def __init__(self, step: DecodePass, index: int, logits_TV: Tensor) -> None:
        self.logits_TV = logits_TV  # row t: after token t
        self.num_kept = 0
        self._step = step
        self._index = index

    def keep(self, *, commit: bool = True) -> Tensor:
        """Accept the next token; returns the logits after it. `commit` as in `Runner.decode`."""
        sequence = self._step.sequences[self._index]
        sequence.open.advance(1)
        self.num_kept += 1
        commit_run(sequence, commit)
        return self.logits_TV[self.num_kept - 1]

    @torch.inference_mode()
    def observe(self) -> None:
        """Pass the attention of the accepted tokens to the scorers: before the next pass, or an ObserverSnapshot."""
        self._step.observe(self._index, self.num_kept)


def commit_run(sequence: SequenceCache, commit: bool) -> None:
    """Commit the tokens that have run if asked to, or if the open block holds only drafts and could not seal."""
    block = sequence.open
    if commit or (block.room == 0 and block.committed == 0):
        block.commit_all()
