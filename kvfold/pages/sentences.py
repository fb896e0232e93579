"""Sentence boundaries of a sequence: recorded as tokens are read, looked up by the positions of slots.

N positions   E sentences
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor


class Sentences:
    """Positions of tokens that end a sentence, ascending; the last ones may be of drafts that did not stay."""

    def __init__(self, ends: Iterable[int] = ()) -> None:
        self.ends = list(ends)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.ends)

    def note(self, start: int, ids: Sequence[int], ending: Container[int]) -> None:
        """These tokens stand at position `start` and behind; what was there before is forgotten."""
        del self.ends[bisect_left(self.ends, start) :]
        self.ends += [start + i for i, token in enumerate(ids) if token in ending]

    def numbers(self, position: Tensor, longest: int) -> Tensor:
        """Of each position, the number of its sentence; after every `longest` tokens a sentence begins anew."""
        start_E = torch.tensor([0, *(end + 1 for end in self.ends)], device=position.device)
        sentence = torch.searchsorted(start_E, position.contiguous(), right=True) - 1
        pieces_E = (start_E.diff() + longest - 1) // longest
        first_E = torch.cat((start_E[:1], pieces_E.cumsum(0)))
        return first_E[sentence] + (position - start_E[sentence]) // longest

    def copy(self) -> Sentences:
        return Sentences(self.ends)
