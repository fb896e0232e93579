"""Make a prompt as long as wanted: the number of units (words, lines, pairs) that comes nearest.

Most sources take the largest number that stays below the length. The nearest one halves the distance, which matters at
a thousand tokens when a unit has forty. What a sample hides stands among the units at depths from 0 (the beginning) to
1 (the end).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.errors import InputError

NUM_DEPTHS = 10
_Unit = TypeVar("_Unit")


def fit(setting: Setting, make: Callable[[int], Sample], *, least: int = 1, most: int | None = None) -> Sample:
    """The sample whose prompt comes nearest to the setting's length, of `least` units or more.

    `make(n)` builds the sample of n units; its prompt has to grow with n. `most` says how many units there are.
    """

    @cache
    def size(count: int) -> int:
        return setting.count_tokens(make(count).text)

    if size(least) > setting.length:
        needed = f"give a length of at least {size(least)}"
        raise InputError(f"prompts of {setting.length} tokens are too short for {make(least).task}; {needed}")
    if most is not None and size(most) < setting.length:
        found = f"what was given is enough for {size(most)}"
        raise InputError(f"prompts of {setting.length} tokens are too long for {make(most).task}; {found}")
    low, high = _nearest(size, setting.length, least, most)
    return make(min(low, high, key=lambda count: abs(size(count) - setting.length)))


def _nearest(size: Callable[[int], int], length: int, low: int, most: int | None) -> tuple[int, int]:
    """Two neighbouring counts around the length. Sizes grow nearly evenly, so guessing beats halving."""
    low, high = _around(size, length, low, most)
    while high - low > 1:
        guess = low + (length - size(low)) * (high - low) // max(1, size(high) - size(low))
        margin = 1 + (high - low) // 64
        for count in (guess - margin, guess + margin):
            count = min(max(count, low + 1), high - 1)
            if size(count) <= length:
                low = max(low, count)
            else:
                high = min(high, count)
            if high - low <= 1:
                break
    return low, high


def _around(size: Callable[[int], int], length: int, least: int, most: int | None) -> tuple[int, int]:
    """Counts below and above the length."""
    low, high = least, least + 8 if most is None else min(most, least + 8)
    while size(high) < length:
        growth = max(2.0, 1.1 * (length - size(least)) / max(1, size(high) - size(least)))
        low, high = high, least + round((high - least) * growth)
        high = high if most is None else min(most, high)
    return low, high


def even_depth(index: int) -> float:
    """The depth of sample `index`: the middles of ten equal parts of the document in turn."""
    return (index % NUM_DEPTHS + 0.5) / NUM_DEPTHS


class Supply(Generic[_Unit]):
    """The beginning of an endless run, as long as asked for: `take(n)` always starts with what `take(m)` gave."""

    def __init__(self, source: Iterator[_Unit]) -> None:
        self._source = source
        self._taken: list[_Unit] = []

    def take(self, count: int) -> list[_Unit]:
        self._taken += islice(self._source, max(0, count - len(self._taken)))
        return self._taken[:count]


class Text:
    """An endless run of sentences, cut after any number of words."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._source = sentences
        self._sentences: list[str] = []
        self._ends: list[int] = []  # words up to and including each sentence

    def take(self, num_words: int) -> list[str]:
        """The sentences of the first `num_words` words; the last may be cut short."""
        while not self._ends or self._ends[-1] < num_words:
            self._sentences.append(next(self._source))
            self._ends.append((self._ends or [0])[-1] + len(self._sentences[-1].split()))
        last = bisect_left(self._ends, num_words)
        missing = self._ends[last] - num_words
        words = self._sentences[last].split()
        return [*self._sentences[:last], " ".join(words[: len(words) - missing])]


class Planted(NamedTuple):
    depth: float
    text: str


def spread(place: int, count: int) -> float:
    """The depth of one of `count` things that stand in the middles of equal parts."""
    return (place + 0.5) / count


def scatter(planted: Sequence[Planted], sentences: Sequence[str]) -> list[str]:
    """The sentences with each planted one before the one at its depth; those at one depth keep their order."""
    found = list(sentences)
    for depth, text in sorted(planted, key=lambda each: each.depth)[::-1]:
        found.insert(round(depth * len(sentences)), text)
    return found


# The five sentences that stand for nothing, in passkey retrieval (arXiv:2305.16300) and whatever followed it.
SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


def lines(hidden: Sequence[tuple[float, str]], count: int) -> str:
    """`count` lines of noise with each hidden line at its depth."""
    return insert(hidden, [" ".join(SENTENCES)] * count, "\n")


def insert(hidden: Sequence[tuple[float, str]], units: Sequence[str], between: str) -> str:
    """The units, joined, with each hidden one before the unit at its depth from 0 (the start) to 1 (the end)."""
    found = list(units)
    for depth, unit in sorted(hidden, key=lambda pair: pair[0], reverse=True):
        found.insert(int(depth * len(units)), unit)
    return between.join(found)
