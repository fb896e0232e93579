"""RULER's tasks that need no file: eight kinds of needles, variable tracking, and counting words.

vt: one value handed through five variables in lines of noise, after one worked example. cwe: the ten most common words
of a list; they occur 30 times and others 3 times, below 4096 tokens 6 times and once. fwe: the three most frequent of a
coded text, whose words follow a zeta distribution: of N words, rank k occurs floor(N·k^-α / ζ(α)) times, with α = 2 and
so ζ(α) = π²/6. Rank one is dots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import pi
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Literal, NamedTuple

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.fill import Supply, Text, fit, insert, lines
from kvfold.bench.workloads.needle import Magic
from kvfold.bench.workloads.words import codes, numbers, pairs, uuids, words

_DEPTHS = tuple(step / 39 for step in range(40))
_DRAW: dict[str, Callable[[Random], Iterator[str]]] = {"words": pairs, "numbers": numbers, "uuids": uuids}
Units = Callable[[int], str]


@dataclass(frozen=True)
class Needles:
    """Among noise, prose, or other needles; `asked` of the keys are asked for."""

    among: Literal["noise", "prose", "needles"]
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", values="uuids"),
    "niah_multikey_1": Needles("prose", num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("prose", num_values=4),
    "niah_multiquery": Needles("prose", num_keys=4, asked=4),
}


def niah(setting: Setting, task: str, index: int, random: Random) -> Sample:
    kind = NEEDLES[task]
    keys, values = _DRAW[kind.keys](random), _DRAW[kind.values](random)
    found = {key: tuple(islice(values, kind.num_values)) for key in islice(keys, kind.num_keys)}
    asked = tuple(random.sample(list(found), kind.asked))
    answers = tuple(value for key in asked for value in found[key])
    magic = Magic(kind.values, asked, len(answers))
    needles = [magic.sentence(key, value) for key, held in found.items() for value in held]
    depths = _depths(kind, len(needles), random)
    depth = depths[needles.index(magic.sentence(asked[0], answers[0]))]
    facts = {"depth": round(depth, 2), "needles": len(needles)}  # of the first needle asked for
    others = (magic.sentence(key, value) for key, value in zip(keys, values, strict=True))
    body = _body(kind, list(zip(depths, needles, strict=True)), others, setting.haystack(random))

    def make(count: int) -> Sample:
        context = magic.instruction + body(count)
        start = len(magic.instruction)
        return Sample(task, index, context, magic.question, answers, 128, magic.begun, facts, start)

    return fit(setting, make)


def _depths(kind: Needles, count: int, random: Random) -> list[float]:
    """Prose: forty even steps, each once. Lines: anywhere."""
    return random.sample(_DEPTHS, count) if kind.among == "prose" else [random.random() for _ in range(count)]


def _body(kind: Needles, hidden: list[tuple[float, str]], others: Iterator[str], prose: Iterator[str]) -> Units:
    """The text of so many words of prose, or lines of anything else."""
    if kind.among == "noise":
        return lambda count: lines(hidden, count)
    if kind.among == "needles":
        supply = Supply(others)
        return lambda count: insert(hidden, supply.take(count), "\n")
    text = Text(prose)
    return lambda count: insert(hidden, text.take(count), " ")


_NUM_HOPS = 4
_NAME_LENGTH = 5
_EXAMPLE_NAME_LENGTH = 3
_EXAMPLE_TOKENS = 500
_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"


def vt(setting: Setting, task: str, index: int, random: Random) -> Sample:
    solved = _tracking(replace(setting, length=_EXAMPLE_TOKENS), task, index, random, _EXAMPLE_NAME_LENGTH)
    example = f"{solved.context}{solved.question} {solved.reply_prefix} {' '.join(solved.answers)}\n\n"
    return _tracking(setting, task, index, random, _NAME_LENGTH, before=example)


def _tracking(setting: Setting, task: str, index: int, random: Random, name_length: int, *, before: str = "") -> Sample:
    names = tuple(codes(random, ascii_uppercase, name_length, _NUM_HOPS + 1))
    value = str(random.randrange(10_000, 99_999))
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {source}" for source, name in pairwise(names)]
    depths = sorted(random.random() for _ in statements)
    hidden = list(zip(depths, statements, strict=True))
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    begun = (
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )

    def make(count: int) -> Sample:
        context = before + _INSTRUCTION + lines(hidden, count)
        facts, start = {"hops": _NUM_HOPS}, len(before) + len(_INSTRUCTION)
        return Sample(task, index, context, question, names, 30, begun, facts, start)

    return fit(setting, make)


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
        instruction = example + _LIST_INSTRUCTION
        context = instruction + _numbered(_repeat(drawn, repeats, Random(order)))
        answers, facts, start = tuple(drawn[:_NUM_COMMON]), {"words": count}, len(instruction)
        return Sample(task, index, context, _LIST_QUESTION, answers, 120, _LIST_BEGUN, facts, start)

    return fit(setting, make, least=_NUM_COMMON + 1)


def fwe(setting: Setting, task: str, index: int, random: Random) -> Sample:
    num_words = max(5, setting.length // _TOKENS_PER_CODED_WORD)
    vocabulary = ["...", *codes(random, ascii_lowercase, _CODED_LENGTH, num_words - 1)]
    order = random.random()

    def make(count: int) -> Sample:
        drawn = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(count * rank**-_ALPHA / _ZETA))]
        Random(order).shuffle(drawn)
        context, facts = _CODED_INSTRUCTION + " ".join(drawn), {"words": len(drawn)}
        answers, start = tuple(vocabulary[1:4]), len(_CODED_INSTRUCTION)
        return Sample(task, index, context, _CODED_QUESTION, answers, 50, _CODED_BEGUN, facts, start)

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
