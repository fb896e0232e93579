"""Tokens that ran ahead of what was sampled: their logits, and the choice how many of them stay.

T tokens of one sequence   V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass


class Verified:
    """Tokens of one sequence after a pass. Those that are kept enter the cache; nothing is left of the others.

    It ends with the next pass over its sequence, which overwrites what was not kept.
    """

    def __init__(self, step: DecodePass, index: int, logits_TV: Tensor) -> None:
        self.logits_TV = logits_TV  # row t: after token t
        self.num_kept = 0
        self._step = step
        self._index = index

    def keep(self, *, commit: bool = True) -> Tensor:
        """The next token stays; returns the logits after it. `commit` as in `Runner.decode`."""
        sequence = self._step.sequences[self._index]
        sequence.open.advance(1)
        self.num_kept += 1
        commit_run(sequence, commit)
        return self.logits_TV[self.num_kept - 1]

    @torch.inference_mode()
    def observe(self) -> None:
        """Note for the scorers what the kept tokens attended to: before the next pass, or an ObserverSnapshot."""
        self._step.observe(self._index, self.num_kept)


def commit_run(sequence: SequenceCache, commit: bool) -> None:
    """Commit what has run, where asked to, or where the open block holds nothing but drafts and could not seal."""
    block = sequence.open
    if commit or (block.room == 0 and block.committed == 0):
        block.commit(block.fill - block.committed)
