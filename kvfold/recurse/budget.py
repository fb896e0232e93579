"""Bounds of a reading: levels, calls, tokens, seconds; and how many of the next calls stay within them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from kvfold.errors import InputError
from kvfold.recurse.usage import Usage


@dataclass(frozen=True)
class Budget:
    """Upper bounds; None is none. `tokens` counts those that are read and generated, the shared prefix once."""

    depth: int = 5
    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise InputError(f"the budget of {one.name} is {value!r}; it is above 0, or left out")

    @property
    def is_bounded(self) -> bool:
        """Whether calls may be left out."""
        return any(bound is not None for bound in (self.calls, self.tokens, self.seconds))


def check_budget(budget: Budget | None) -> Budget:
    """The budget, or one without bounds but depth; InputError for anything else."""
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"budget is {budget!r}; give a Budget, such as Budget(calls=5)")
    return budget or Budget()


def check_counts(least: int = 1, **counts: int) -> None:
    """InputError for what is no whole number from `least` on."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise InputError(f"{name} is {count!r}; give a whole number from {least} on")


class Meter:
    """A budget in use: what the clock has spent since it was made, and calls by their `usage`."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._clock = budget, clock
        self._began = clock()
        self.usage = Usage()

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @property
    def is_late(self) -> bool:
        return self._budget.seconds is not None and self.seconds >= self._budget.seconds

    def affordable(self, num_tokens: Sequence[int], reserved_calls: int = 0) -> tuple[int, str | None]:
        """How many of the next calls, of so many tokens each, fit; and which bound excludes the others, if one does.

        Under a bound of seconds the first call goes alone: its speed tells how many may follow it.
        """
        found: dict[str, int] = {}
        budget, usage = self._budget, self.usage
        if budget.calls is not None:
            found["calls"] = max(0, budget.calls - reserved_calls - usage.calls)
        if budget.tokens is not None:
            found["tokens"] = _fitting(num_tokens, budget.tokens - usage.tokens)
        if budget.seconds is not None:
            left = budget.seconds - self.seconds
            if left <= 0:
                found["seconds"] = 0
            elif usage.calls:
                found["seconds"] = _fitting(num_tokens, left * usage.tokens / max(usage.seconds, 1e-9))
        reason = min(found, key=lambda name: found[name], default=None)
        if reason is None or found[reason] >= len(num_tokens):
            return len(num_tokens), None
        return found[reason], reason

    @property
    def starts_with_one(self) -> bool:
        """Whether the speed has to be learnt first."""
        return self._budget.seconds is not None and self.usage.calls == 0


def _fitting(num_tokens: Sequence[int], most: float) -> int:
    """How many of these fit, one after another, into so many tokens."""
    total = 0
    for number, tokens in enumerate(num_tokens):
        total += tokens
        if total > most:
            return number
    return len(num_tokens)
