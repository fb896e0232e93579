"""Which units stay: the worthiest first while they fit, less worthy the more they repeat one that stays.

Long texts are chosen segment by segment, each with its share of the target, so that time and memory grow with the text
and not with its square.

    N units   n units of a segment
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Bools, Floats, Selector, Task

Integers = NDArray[np.int64]
SEGMENT = 2048  # units
_PENALTY = 0.5  # of the largest cosine to a unit that stays


def costs(task: Task) -> Integers:
    """[N]: tokens that begin in each unit."""
    bounds = np.array([(unit.start, unit.end) for unit in task.units], dtype=np.int64).reshape(-1, 2)
    low, high = np.searchsorted(task.tokens.starts, bounds).T
    found: Integers = high - low
    return found


def segments(num_units: int) -> list[tuple[int, int]]:
    """Bounds of segments of nearly equal length."""
    count = max(1, -(-num_units // SEGMENT))
    return list(pairwise(num_units * number // count for number in range(count + 1)))


def choose(task: Task, selector: Selector) -> Bools:
    """[N]: the units that stay, within the target."""
    cost_N, worth_N = costs(task), np.round(selector.worth(task), 9)
    chosen_N = task.kept_N.copy()
    left = task.target - int(cost_N[chosen_N].sum())
    free = cost_N * ~chosen_N
    total, spent_before, freed = int(free.sum()), 0, 0
    for low, high in segments(len(task.units)):
        freed += int(free[low:high].sum())
        room = (left * freed // total if total else 0) - spent_before  # what a segment leaves goes to the next
        similar = selector.similarity(task, low, high)
        part = slice(low, high)
        chosen_N[part] = _choose(worth_N[part], cost_N[part], chosen_N[part], room, similar)
        spent_before += int((free[part] * chosen_N[part]).sum())
    return chosen_N


def _choose(worth: Floats, cost: Integers, kept: Bools, room: int, similar: Floats | None) -> Bools:
    """Units of one segment; ties go to the earlier one."""
    chosen = kept.copy()
    nearest = np.zeros(len(worth)) if similar is None or not kept.any() else similar[kept].max(0)
    open_ = ~chosen & (cost <= room)
    while open_.any():
        gain = np.where(open_, worth - _PENALTY * np.abs(worth) * np.maximum(nearest, 0.0), -np.inf)
        best = int(gain.argmax())
        chosen[best] = True
        room -= int(cost[best])
        if similar is not None:
            nearest = np.maximum(nearest, similar[best])
        open_ &= ~chosen & (cost <= room)
    return chosen
