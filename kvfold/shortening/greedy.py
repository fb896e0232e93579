"""Which units stay: the worthiest first while they fit, less worthy the more they repeat one that stays.

Selectors that look for repetition compare all units of a segment with each other; a long text has several segments,
each with its share of the target, so that time and memory grow with the text and not with its square. Without that the
whole text is one order. Units may overlap: a token that stays already costs nothing.

    N units   n units of a segment
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Bools, Floats, Selector, Task
from kvfold.shortening.protected import check_room

Integers = NDArray[np.int64]
SEGMENT = 1024  # units
_PENALTY = 0.5  # of the largest cosine to a unit that stays


@dataclass
class Room:
    """Tokens that are left, and how many each unit would take of them."""

    low_N: Integers  # first token of each unit
    high_N: Integers
    cost_N: Integers
    left: int
    covered: Bools  # by token: it stays
    chosen_N: Bools

    @classmethod
    def of(cls, task: Task) -> Room:
        bounds = np.array([(unit.start, unit.end) for unit in task.units], dtype=np.int64).reshape(-1, 2)
        low, high = np.searchsorted(task.tokens.starts, bounds).T
        covered = np.zeros(len(task.tokens), dtype=bool)
        found = cls(low, high, high - low, task.target, covered, np.zeros(len(low), dtype=bool))
        for number in np.flatnonzero(task.kept_N):
            found.take(int(number))
        return found

    def take(self, number: int) -> None:
        """A unit stays; units that overlap it cost less from now on."""
        self.left -= int(self.cost_N[number])
        self.covered[self.low_N[number] : self.high_N[number]] = True
        self.chosen_N[number] = True
        self._recount(number)
        for step in (-1, 1):
            at = number + step
            while 0 <= at < len(self.cost_N) and self._overlap(number, at):
                self._recount(at)
                at += step

    def _overlap(self, number: int, at: int) -> bool:
        first, second = min(number, at), max(number, at)
        return bool(self.low_N[second] < self.high_N[first])

    def _recount(self, number: int) -> None:
        tokens = self.covered[self.low_N[number] : self.high_N[number]]
        self.cost_N[number] = len(tokens) - np.count_nonzero(tokens)


def segments(num_units: int) -> list[tuple[int, int]]:
    """Bounds of segments of nearly equal length."""
    count = max(1, -(-num_units // SEGMENT))
    return list(pairwise(num_units * number // count for number in range(count + 1)))


def choose(task: Task, selector: Selector) -> Bools:
    """[N]: the units that stay, within the target."""
    room = Room.of(task)
    check_room(task, task.target - room.left)
    worth_N = np.round(selector.worth(task), 9)
    if not selector.avoids_repeats:
        _take_in_order(room, worth_N, selector.skips)
        return room.chosen_N
    free_N = room.cost_N * ~room.chosen_N
    total, left, freed = int(free_N.sum()), room.left, 0
    for low, high in segments(len(task.units)):
        freed += int(free_N[low:high].sum())
        reserved = left - (left * freed // total if total else 0)  # what a segment leaves goes to the next
        _take_apart(room, low, worth_N[low:high], selector.similarity(task, low, high), reserved)
    return room.chosen_N


def _take_in_order(room: Room, worth_N: Floats, skips: bool) -> None:
    """Units by worth, the earlier one of two alike; without `skips` the first that does not fit is the end."""
    for number in np.argsort(-worth_N, kind="stable"):
        if room.chosen_N[number]:
            continue
        if room.cost_N[number] <= room.left:
            room.take(int(number))
        elif not skips:
            return


def _take_apart(room: Room, low: int, worth_n: Floats, similar_nn: Floats, reserved: int) -> None:
    """Units of one segment, each worth less by its largest similarity to one that stays; `reserved` tokens are left."""
    part = slice(low, low + len(worth_n))
    chosen_n, cost_n = room.chosen_N[part], room.cost_N[part]  # views
    nearest = similar_nn[chosen_n].max(0, initial=0.0)
    while True:
        open_n = ~chosen_n & (cost_n <= room.left - reserved)
        if not open_n.any():
            return
        gain = np.where(open_n, worth_n - _PENALTY * np.abs(worth_n) * nearest, -np.inf)
        best = int(gain.argmax())
        room.take(low + best)
        nearest = np.maximum(nearest, similar_nn[best])
