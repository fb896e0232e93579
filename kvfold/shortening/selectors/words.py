"""`words`: words that the loaded model could not have guessed (LLMLingua, arXiv:2310.05736).

N units   A atoms (words, or runs of words that are never parted)   T tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.policy.registry import register
from kvfold.shortening.atoms import Atoms
from kvfold.shortening.base import Bools, Floats, Selector, Task
from kvfold.shortening.protected import check_room, kept_spans, none_fits, protected_spans

Integers = NDArray[np.int64]


@register(
    "selector",
    "words",
    paper="arXiv:2310.05736",
    cost="a forward over the text",
    published="differs: losses given the whole text, whole words, one threshold",
)
@dataclass(frozen=True)
class Words(Selector):
    """Question-free: words of high self-information -log p, in sentences of high self-information.

    LLMLingua's budget controller: sentences by their mean loss while they fit into `first` times the target, then words
    of these by their mean loss, above one threshold for the whole text. Numbers, ids, quotes, URLs and negations of a
    sentence that stays are never cut; code, headings and table rows stay whole or go; what `keep` names stays in any
    case.

    Against the authors' code: losses are those of the original text and not of what is left of it, which takes one
    forward; words are not split; there is no order of demonstrations.
    """

    first: float = 1.4

    @property
    def needs_model(self) -> bool:
        return True

    def validate(self) -> str | None:
        return None if self.first >= 1 else f"first is at least 1, not {self.first}: words are chosen from sentences"

    def spans(self, task: Task) -> tuple[tuple[int, int], ...]:
        assert task.model is not None
        if not task.units:
            return ()
        starts_T, loss_T = task.model.losses(task.text, task.progress)
        kept, protected = kept_spans(task), protected_spans(task.text)
        atoms = Atoms.of(task, [*kept, *protected], starts_T)
        cost_A, unit_A = np.diff(atoms.tokens(task.tokens.starts)), atoms.units(task)
        stays_A = atoms.holding(kept)
        stays_A |= atoms.breaks_beside(stays_A)
        left = task.target - int(cost_A[stays_A].sum())
        check_room(task, task.target - left)
        uncut_A = atoms.holding(protected) & ~stays_A
        uncut_N = np.bincount(unit_A, cost_A * uncut_A, len(task.units)) + _break_costs(atoms, cost_A, unit_A, task)
        taken_A = self._sentences(task, starts_T, loss_T, uncut_N, left)[unit_A]
        stays_A |= (uncut_A & taken_A) | atoms.breaks_beside(taken_A)
        _fill(stays_A, taken_A & ~atoms.is_break_A, cost_A, _means(loss_T, atoms.tokens(starts_T)), task.target)
        if not (stays_A & ~atoms.is_break_A).any():
            raise none_fits(task, self._least(task, atoms, cost_A, unit_A, uncut_N))
        return atoms.joined(task.text, stays_A)

    def _least(self, task: Task, atoms: Atoms, cost_A: Integers, unit_A: Integers, uncut_N: NDArray[Any]) -> int:
        """Tokens of a target into which a word of some sentence fits."""
        least_N = np.full(len(task.units), len(task.tokens))
        is_word_A = ~atoms.is_break_A
        np.minimum.at(least_N, unit_A[is_word_A], cost_A[is_word_A])
        needed_N = np.maximum(np.ceil(task.num_tokens_N / self.first), uncut_N + least_N)
        return min(len(task.tokens), int(needed_N.min()))

    def _sentences(self, task: Task, starts_T: Integers, loss_T: Floats, uncut_N: NDArray[Any], left: int) -> Bools:
        """[N]: units by mean loss, while they fit and what is never cut in them fits too."""
        bounds = np.array([(unit.start, unit.end) for unit in task.units], dtype=np.int64).reshape(-1, 2)
        cost_N = np.diff(np.searchsorted(task.tokens.starts, bounds))[:, 0]
        worth_N = np.array([_mean(loss_T[low:high]) for low, high in np.searchsorted(starts_T, bounds)])
        taken_N, room = np.zeros(len(bounds), dtype=bool), self.first * task.target
        for number in np.argsort(-worth_N, kind="stable"):
            if cost_N[number] <= room and uncut_N[number] <= left:
                taken_N[number] = True
                room -= cost_N[number]
                left -= int(uncut_N[number])
        return taken_N


def _fill(stays_A: Bools, may_A: Bools, cost_A: Integers, worth_A: Floats, target: int) -> None:
    """The worthiest atoms that may stay do, while they fit."""
    left = target - int(cost_A[stays_A].sum())
    for number in np.argsort(-worth_A, kind="stable"):
        if may_A[number] and not stays_A[number] and cost_A[number] <= left:
            stays_A[number] = True
            left -= int(cost_A[number])


def _break_costs(atoms: Atoms, cost_A: Integers, unit_A: Integers, task: Task) -> Integers:
    """[N]: tokens of the line breaks before and behind each unit."""
    at = np.flatnonzero(atoms.is_break_A)
    behind, before = unit_A[at], np.minimum(unit_A[at] + 1, len(task.units) - 1)
    counts = (np.bincount(units, cost_A[at], len(task.units)) for units in (behind, before))
    found: Integers = sum(counts, np.zeros(len(task.units))).astype(np.int64)
    return found


def _means(value_T: Floats, first: Integers) -> Floats:
    """Means of consecutive runs, to three digits: less depends on how a machine adds."""
    total = np.concatenate((np.zeros(1), np.cumsum(value_T)))
    return np.round((total[first[1:]] - total[first[:-1]]) / np.maximum(np.diff(first), 1), 3)


def _mean(value: Floats) -> float:
    return round(float(value.mean()), 3) if len(value) else 0.0
