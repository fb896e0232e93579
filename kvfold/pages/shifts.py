"""Position shifts of kept keys under `slot` positions, cached until slots change (eager decode).

Finding the borders reads back from the device, which a decode step should not wait for. A result holds as long as
no slot is sealed or evicted: the run is made anew when its own slots change, and every seal moves the rest.

    h heads of a stretch   S slots   N pieces
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.pages.extent import Run

_MOST_PIECES = 4  # attention calls that are cheaper than rotating the keys of a row


class Piece(NamedTuple):
    """Adjacent slots of a stretch that appear moved alike, each head by its own distance."""

    slots: slice
    shift_h: Tensor


@dataclass
class Shifts:
    """Pieces of the stretches of one sequence, by run and first head; None where the shift changes often."""

    sealed_len: int = 0
    _found: dict[tuple[int, int], tuple[Run, list[Piece] | None]] = field(default_factory=dict)

    def pieces(self, run: Run, head: int, shift_hS: Tensor, sealed_len: int) -> list[Piece] | None:
        """The pieces of a stretch with these shifts, found once."""
        if sealed_len != self.sealed_len:
            self._found.clear()
            self.sealed_len = sealed_len
        key = (id(run), head)  # the run is kept beside it, so that no other one gets its id
        if key not in self._found:
            self._found[key] = run, find_pieces(shift_hS)
        return self._found[key][1]

    @property
    def num_bytes(self) -> int:
        return sum(piece.shift_h.nbytes for _, pieces in self._found.values() for piece in pieces or ())


def find_pieces(shift_hS: Tensor) -> list[Piece] | None:
    """Runs of equal shifts (sinks and a window have two), or None if they are many."""
    shift_Nh, count_N = torch.unique_consecutive(shift_hS.T, dim=0, return_counts=True)
    if len(shift_Nh) > _MOST_PIECES:
        return None
    counts = count_N.tolist()
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [Piece(slice(end - n, end), row_h) for end, n, row_h in zip(ends, counts, shift_Nh, strict=True)]
