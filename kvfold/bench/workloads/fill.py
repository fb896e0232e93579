"""Make a prompt as long as wanted: the number of units (sentences, lines, pairs) that comes nearest.

Most sources take the largest number that stays below the length. The nearest one halves the distance, which matters at
a thousand tokens when a unit has forty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.errors import InputError

_MAX_UNITS = 1 << 24
_Unit = TypeVar("_Unit")


def fit(setting: Setting, make: Callable[[int], Sample], *, least: int = 1) -> Sample:
    """The sample of `least` units or more whose prompt comes nearest to the setting's length.

    `make(n)` builds the sample of n units; its prompt has to grow with n.
    """

    def tokens(count: int) -> int:
        return setting.count_tokens(make(count).text)

    if (fewest := tokens(least)) > setting.length:
        raise InputError(f"prompts of {setting.length} tokens are too short for {make(least).task}; give {fewest}")
    above = least + 1
    while tokens(above) < setting.length and above < _MAX_UNITS:
        above *= 2
    above = bisect_left(range(above), setting.length, lo=least, key=tokens)
    candidates = [make(count) for count in (max(least, above - 1), above)]
    return min(candidates, key=lambda sample: abs(setting.count_tokens(sample.text) - setting.length))


class Supply(Generic[_Unit]):
    """The beginning of an endless run, as long as asked for: `take(n)` always starts with what `take(m)` gave."""

    def __init__(self, source: Iterator[_Unit]) -> None:
        self._source = source
        self._taken: list[_Unit] = []

    def take(self, count: int) -> list[_Unit]:
        self._taken += islice(self._source, max(0, count - len(self._taken)))
        return self._taken[:count]
