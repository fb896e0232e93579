"""What of a target is left, and what each unit would take of it: tokens and sentences that stay already cost nothing.

Pieces are sentences and other parts, cut where units and labels begin and end. Units are runs of pieces and may
overlap. A unit brings the labels of its pieces with it, and so does what always stays.

    N units   P pieces
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Bools, Task, Unit
from kvfold.shortening.labels import Labels
from kvfold.shortening.word_index import words_of

Integers = NDArray[np.int64]
_LEAST_WORDS = 6  # of a sentence that need not be said twice


@dataclass
class Room:
    """Pieces that stay, and tokens that are left."""

    bounds: Integers  # [P + 1]: where pieces begin
    cost_P: Integers
    says_P: Integers  # pieces of one number say the same
    label_P3: Integers  # pieces with the labels of a piece: its number, its speaker, its line break; -1: none
    first_N: Integers  # pieces of each unit
    last_N: Integers
    stays_P: Bools
    is_said: Bools  # by number of says_P
    left: int

    @classmethod
    def of(cls, task: Task, drops_repeats: bool) -> Room:
        """All of the target, less what always stays."""
        text = task.text
        labels = (Labels.numbered(text), Labels.speakers(text), Labels.line_breaks(text, task.parts))
        kept = [part for part, keep in zip(task.parts, task.kept_n, strict=True) if keep]
        spans, kept_spans, part_spans = (_spans(units, labels) for units in (task.units, kept, task.parts))
        cuts = [array for kind in labels for array in (kind.start_L, kind.end_L)]
        bounds = np.unique(np.concatenate([[0, len(text)], spans.ravel(), part_spans[:, 0], *cuts]))
        cost_P = np.diff(np.searchsorted(task.tokens.starts, bounds))
        says_P = _sayings(text, bounds) if drops_repeats else np.arange(len(cost_P))
        stays_P, is_said = np.zeros((2, len(cost_P)), dtype=bool)
        label_P3 = np.stack([kind.pieces(bounds) for kind in labels], axis=1)
        for low, high in np.searchsorted(bounds, kept_spans):
            stays_P[low:high] = True
        named = label_P3[stays_P]
        stays_P[named[named >= 0]] = True
        is_said[says_P[stays_P]] = True
        first_N, last_N = np.searchsorted(bounds, spans).T
        left = task.target - int(cost_P[stays_P].sum())
        return cls(bounds, cost_P, says_P, label_P3, first_N, last_N, stays_P, is_said, left)

    def pieces(self, unit: int) -> Integers:
        """Pieces of a unit that say what is not said yet, each saying once, with their labels."""
        found = self._own_pieces(unit)
        labels = self.label_P3[found].ravel()
        labels = labels[labels >= 0]
        return np.union1d(found, labels[~self.stays_P[labels]]) if len(labels) else found

    def _own_pieces(self, unit: int) -> Integers:
        low, high = int(self.first_N[unit]), int(self.last_N[unit])
        says = self.says_P[low:high]
        if len(says) == 1:
            return np.flatnonzero(~self.is_said[says]) + low
        _, once = np.unique(says, return_index=True)
        return low + np.sort(once[~self.is_said[says[once]]])

    def cost(self, unit: int) -> int:
        return int(self.cost_P[self.pieces(unit)].sum())

    def take(self, unit: int) -> None:
        pieces = self.pieces(unit)
        self.left -= int(self.cost_P[pieces].sum())
        self.stays_P[pieces] = True
        self.is_said[self.says_P[pieces]] = True

    def spans(self) -> tuple[tuple[int, int], ...]:
        """What stays, neighbours as one."""
        edges = np.diff(np.concatenate([[0], self.stays_P.astype(np.int8), [0]]))
        low, high = self.bounds[np.flatnonzero(edges == 1)], self.bounds[np.flatnonzero(edges == -1)]
        return tuple(zip(low.tolist(), high.tolist(), strict=True))


def _spans(units: Sequence[Unit], labels: Sequence[Labels]) -> Integers:
    """[N, 2]: first and last characters, with the label of which they hold the end."""
    spans = np.array([(unit.start, unit.end) for unit in units], dtype=np.int64).reshape(-1, 2)
    for kind in labels:
        spans = kind.outside(spans)
    return spans


def _sayings(text: str, bounds: Integers) -> Integers:
    """[P]: the first piece that says the same; short pieces say what they say where they stand."""
    first: dict[str, int] = {}
    found = []
    for number, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        words = words_of(text[low:high])
        found.append(first.setdefault(" ".join(words), number) if len(words) >= _LEAST_WORDS else number)
    return np.array(found, dtype=np.int64)
