"""RULER's counting tasks: the ten most common words of a list, and the three most frequent of a coded text.

Common words occur 30 times and others 3 times, below 4096 tokens 6 times and once. Coded words follow a zeta
distribution: of N words, rank k occurs floor(N·k^-α / ζ(α)) times, with α = 2 and so ζ(α) = π²/6. Rank one is dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import pi
from random import Random
from string import ascii_lowercase
from typing import NamedTuple

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.fill import Supply, fit
from kvfold.bench.workloads.words import words

_NUM_COMMON = 10
_SHORT = 4096  # tokens below which lists repeat their words less
_LIST_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_LIST_QUESTION = f"\nQuestion: What are the {_NUM_COMMON} most common words in the above list?"
_LIST_BEGUN = f"Answer: The top {_NUM_COMMON} words that appear most often in the list are:"

_ALPHA = 2.0
_ZETA = pi**2 / 6
_CODED_LENGTH = 6
_TOKENS_PER_CODED_WORD = 50
_CODED_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_CODED_BEGUN = "Answer: According to the coded text above, the three most frequently appeared words are:"


class Repeats(NamedTuple):
    common: int
    other: int


def cwe(setting: Setting, task: str, index: int, random: Random) -> Sample:
    short = setting.length < _SHORT
    repeats, shown, num_shown = (Repeats(6, 1), Repeats(3, 1), 20) if short else (Repeats(30, 3), Repeats(10, 3), 40)
    example = _example(list(islice(words(random), num_shown)), shown, random)
    supply, order = Supply(words(random)), random.random()

    def make(count: int) -> Sample:
        drawn = supply.take(count)
        context = example + _LIST_INSTRUCTION + _numbered(_repeat(drawn, repeats, Random(order)))
        facts = {"words": count}
        return Sample(task, index, context, _LIST_QUESTION, tuple(drawn[:_NUM_COMMON]), 120, _LIST_BEGUN, facts)

    return fit(setting, make, least=_NUM_COMMON + 1)


def fwe(setting: Setting, task: str, index: int, random: Random) -> Sample:
    vocabulary = ["...", *_coded_words(max(5, setting.length // _TOKENS_PER_CODED_WORD) - 1, random)]
    order = random.random()

    def make(count: int) -> Sample:
        drawn = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(count * rank**-_ALPHA / _ZETA))]
        Random(order).shuffle(drawn)
        context, facts = _CODED_INSTRUCTION + " ".join(drawn), {"words": len(drawn)}
        return Sample(task, index, context, _CODED_QUESTION, tuple(vocabulary[1:4]), 50, _CODED_BEGUN, facts)

    return fit(setting, make, least=_least_words())


def _least_words() -> int:
    """So many that the fourth rank occurs more often than the fifth."""
    return next(n for n in range(1, 1000) if int(n * 4**-_ALPHA / _ZETA) > int(n * 5**-_ALPHA / _ZETA) > 0)


def _example(drawn: Sequence[str], repeats: Repeats, random: Random) -> str:
    listed = _numbered(_repeat(drawn, repeats, random))
    return f"{_LIST_INSTRUCTION}{listed}{_LIST_QUESTION} {_LIST_BEGUN} {_numbered(drawn[:_NUM_COMMON])}\n"


def _repeat(drawn: Sequence[str], repeats: Repeats, random: Random) -> list[str]:
    """The first words often, the others seldom, shuffled."""
    found = [*drawn[:_NUM_COMMON]] * repeats.common + [*drawn[_NUM_COMMON:]] * repeats.other
    random.shuffle(found)
    return found


def _numbered(listed: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def _coded_words(count: int, random: Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(ascii_lowercase, k=_CODED_LENGTH))] = None
    return list(found)
