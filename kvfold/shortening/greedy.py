"""Which units stay: the worthiest first while they fit, less worthy the more of their words stay already.

    gain = worth - penalty · |worth| · (share of the unit's words, by their idf, that stay)

A gain only falls as more units stay, so one is counted anew when it comes to the top of a heap (lazy greedy, Minoux
1978): time grows with the text and not with its square.

    N units   V words
"""

from __future__ import annotations

import heapq

import numpy as np

from kvfold.shortening.base import Floats, Selector, Task
from kvfold.shortening.protected import check_room, none_fits
from kvfold.shortening.room import Room

_PENALTY = 0.5


def choose(task: Task, selector: Selector) -> tuple[tuple[int, int], ...]:
    """Spans of the text that stay, within the target."""
    room = Room.of(task, selector.avoids_repeats)
    check_room(task, task.target - room.left)
    worth_N = np.round(selector.worth(task), 9)
    before = room.left
    if selector.avoids_repeats:
        _take_new(task, room, worth_N)
    else:
        _take_in_order(room, worth_N, selector.skips)
    if room.left == before and 2 * before > task.target:
        _check_any(task, room, worth_N, selector.skips)
    return room.spans()


def _check_any(task: Task, room: Room, worth_N: Floats, skips: bool) -> None:
    """SizeError if units were left out and none was taken: nearly all of the target is unused."""
    costs = [cost for unit in np.argsort(-worth_N, kind="stable").tolist() if (cost := room.cost(unit))]
    if costs:
        raise none_fits(task, task.target - room.left + (min(costs) if skips else costs[0]))


def _take_in_order(room: Room, worth_N: Floats, skips: bool) -> None:
    """Units by worth, the earlier one of two alike; without `skips` the first that does not fit is the end."""
    for unit in np.argsort(-worth_N, kind="stable").tolist():
        if room.cost(unit) <= room.left:
            room.take(unit)
        elif not skips:
            return


def _take_new(task: Task, room: Room, worth_N: Floats) -> None:
    """Units by gain, the earlier one of two alike."""
    index = task.words
    weight_V = index.weights()
    total_N = np.maximum(index.sums(weight_V[index.ids_W]), 1)
    is_new_V = np.ones(len(weight_V), dtype=bool)
    for low, high in room.spans():
        is_new_V[index.known_ids(task.text[low:high])] = False
    heap = [(-worth, unit) for unit, worth in enumerate(worth_N.tolist())]
    heapq.heapify(heap)
    while heap:
        _, unit = heap[0]
        if room.cost(unit) > room.left:
            heapq.heappop(heap)
            continue
        ids = index.ids(unit)
        said = 1 - int(weight_V[ids[is_new_V[ids]]].sum()) / int(total_N[unit])
        entry = (_PENALTY * abs(worth_N[unit]) * said - worth_N[unit], unit)
        if entry > heapq.heapreplace(heap, entry):
            continue
        heapq.heappop(heap)
        room.take(unit)
        is_new_V[ids] = False
