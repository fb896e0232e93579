"""The synthetic retrieval tasks of InfiniteBench (arXiv:2402.13718), at any length.

passkey        five digits, said twice in lines of noise
number_string  ten digits, of which five repeat a neighbour
kv_retrieval   the value of one of many uuids in a JSON object
math_find      one of the three largest or smallest numbers of a list, or its median
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from random import Random
from statistics import median
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Supply, even_depth, fit, lines
from kvfold.bench.workloads.metrics import first_digits, first_number, split_words
from kvfold.bench.workloads.retrieval import ask_pair

_HIDDEN = "There is an important info hidden inside a lot of irrelevant text."
_QUIZ = "I will quiz you about the important information there.\n\n"
_LOWEST, _HIGHEST = (0, 40), (59, 99)  # the ends of a list are drawn from these, or they could be guessed
_LEAST_NUMBERS = 64  # few enough to fit anywhere, enough to have three largest
_RANKS: dict[str, Callable[[Sequence[int]], float]] = {
    "largest number": lambda values: sorted(set(values))[-1],
    "second largest number": lambda values: sorted(set(values))[-2],
    "third largest number": lambda values: sorted(set(values))[-3],
    "smallest number": lambda values: sorted(set(values))[0],
    "second smallest number": lambda values: sorted(set(values))[1],
    "third smallest number": lambda values: sorted(set(values))[2],
    "median number": median,
}


@workload
@dataclass(frozen=True)
class Infinite(Workload):
    name: ClassVar[str] = "infinite"
    summary: ClassVar[str] = "digits, pairs and order statistics in very long contexts"
    source: ClassVar[str] = "InfiniteBench, arXiv:2402.13718"
    metric: ClassVar[str] = "1 if the reply's first number is right, or for kv_retrieval one of its words"
    differences: ClassVar[str] = (
        "generated at any length; ten even depths in turn; lists of math_find span less than 0 to 99, by chance, and "
        "equal numbers rank once; its replies may have 6 tokens instead of 3"
    )
    tasks: ClassVar[tuple[str, ...]] = ("passkey", "number_string", "kv_retrieval", "math_find")

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        if task == "kv_retrieval":
            begun = "The value associated with the specified key is:"
            return ask_pair(setting, task, index, random, ", ", 50, begun)
        return (_list if task == "math_find" else _digits)(setting, task, index, random)

    def score(self, sample: Sample, reply: str) -> float:
        (answer,) = sample.answers
        if sample.task == "kv_retrieval":
            return float(answer in split_words(reply))
        if sample.task == "math_find":
            return float(first_number(reply) == float(answer))
        return float(first_digits(reply) == answer)


def _digits(setting: Setting, task: str, index: int, random: Random) -> Sample:
    long = task == "number_string"
    key, depth = _number_string(random) if long else _five_digits(random), even_depth(index)
    noun = "sequence of digits" if long else "pass key"
    hidden = [(depth, f"The {noun} is {key}. Remember it. {key} is the {noun}.")]
    instruction = f"{_HIDDEN} {'Find it.' if long else 'Find it and memorize them.'} {_QUIZ}"

    def make(count: int) -> Sample:
        context, question = instruction + lines(hidden, count), f"\n\nWhat is the {noun}?"
        most, facts, start = 12 if long else 6, {"depth": depth}, len(instruction)
        return Sample(task, index, context, question, (key,), most, f"The {noun} is", facts, start)

    return fit(setting, make)


def _list(setting: Setting, task: str, index: int, random: Random) -> Sample:
    sought = tuple(_RANKS)[index % len(_RANKS)]
    lowest, highest = random.randint(*_LOWEST), random.randint(*_HIGHEST)
    supply = Supply(random.randint(lowest, highest) for _ in repeat(None))
    verb = "Calculate" if sought == "median number" else "Find"

    def make(count: int) -> Sample:
        values = supply.take(count)
        instruction = f"{verb} the {sought} from the list below:\n\n"
        context, start = f"{instruction}[{', '.join(map(str, values))}]", len(instruction)
        answer, facts = f"{_RANKS[sought](values):g}", {"sought": sought, "numbers": count}
        question = "\n\nYou should answer with only one number, no other words."
        return Sample(task, index, context, question, (answer,), 6, f"The {sought} of the list is:", facts, start)

    return fit(setting, make, least=_LEAST_NUMBERS)


def _five_digits(random: Random) -> str:
    return "".join(random.choices("0123456789", k=5))


def _number_string(random: Random) -> str:
    """Five digits, each of five drawn places then doubled."""
    digits = list(_five_digits(random))
    for length in range(5, 10):
        place = random.randrange(length)
        digits.insert(place, digits[place])
    return "".join(digits)
