"""Retrieval of one thing by its name: a pass key in noise, a line of a register, a pair of uuids.

In `kv` no word of the context is predictable and every pair may be asked for, so whatever is dropped without the
question is missed: the hardest case for eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import SENTENCES, Supply, Text, even_depth, fit, insert
from kvfold.bench.workloads.metrics import first_digits, last_digits, match_part
from kvfold.bench.workloads.words import pairs, uuids

_LARGEST = 50_000  # pass key or value of a line
_KEY_INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_LINES_INSTRUCTION = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
_PAIRS_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"


@workload
@dataclass(frozen=True)
class Passkey(Workload):
    name: ClassVar[str] = "passkey"
    summary: ClassVar[str] = "a number said twice in text that repeats itself: the least a cache must keep"
    source: ClassVar[str] = "landmark attention, arXiv:2305.16300"
    metric: ClassVar[str] = "1 if the first number of the reply is the pass key"
    differences: ClassVar[str] = "ten even depths in turn instead of random ones"
    tasks: ClassVar[tuple[str, ...]] = ("passkey",)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        key, depth, filler = str(random.randint(1, _LARGEST)), even_depth(index), Text(cycle(SENTENCES))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."

        def make(num_words: int) -> Sample:
            context = f"{_KEY_INSTRUCTION}\n{insert([(depth, needle)], filler.take(num_words), ' ')}"
            question, begun = "\nWhat is the pass key?", "The pass key is"
            facts, start = {"depth": depth}, len(_KEY_INSTRUCTION) + 1
            return Sample(task, index, context, question, (key,), 8, begun, facts, start)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        return float(first_digits(reply) == sample.answers[0])


@workload
@dataclass(frozen=True)
class Lines(Workload):
    name: ClassVar[str] = "lines"
    summary: ClassVar[str] = "one of many lines that look alike: nothing tells beforehand which one matters"
    source: ClassVar[str] = "LongEval line retrieval, LongChat 2023"
    metric: ClassVar[str] = "1 if the last number of the reply is the line's value"
    differences: ClassVar[str] = "as many lines as the length allows instead of 200 to 680; ten even depths in turn"
    tasks: ClassVar[tuple[str, ...]] = ("lines",)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        register = Supply((name, random.randint(1, _LARGEST)) for name in pairs(random))
        depth = even_depth(index)

        def make(count: int) -> Sample:
            record = register.take(count)
            asked, value = record[int(depth * count)]
            listed = "\n".join(f"line {name}: REGISTER_CONTENT is <{held}>" for name, held in record)
            question = f"\n\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {asked}? "
            facts = {"depth": depth, "lines": count}
            question += "I need the number."
            context, start = _LINES_INSTRUCTION + listed, len(_LINES_INSTRUCTION)
            return Sample(task, index, context, question, (str(value),), 32, "", facts, start)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        found = last_digits(reply)
        return float(found != "" and int(found) == int(sample.answers[0]))


@workload
@dataclass(frozen=True)
class KeyValue(Workload):
    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "one of many random pairs: context that nothing can be left out of"
    source: ClassVar[str] = "Lost in the Middle, arXiv:2307.03172"
    metric: ClassVar[str] = "1 if the value occurs in the reply"
    differences: ClassVar[str] = "as many pairs as the length allows instead of 75, 140 or 300; ten even depths in turn"
    tasks: ClassVar[tuple[str, ...]] = ("kv",)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        return ask_pair(setting, task, index, random, ",\n ", 100, "Corresponding value:")

    def score(self, sample: Sample, reply: str) -> float:
        return match_part(sample.answers, reply)


def ask_pair(
    setting: Setting, task: str, index: int, random: Random, between: str, max_new_tokens: int, begun: str
) -> Sample:
    """The value of one of many uuids in a JSON object."""
    source, depth = uuids(random), even_depth(index)
    supply = Supply(zip(source, source, strict=True))

    def make(count: int) -> Sample:
        pairs = supply.take(count)
        key, value = pairs[int(depth * count)]
        record = between.join(f'"{name}": "{held}"' for name, held in pairs)
        context, facts = f"{_PAIRS_INSTRUCTION}{{{record}}}", {"depth": depth, "pairs": count}
        question, start = f'\n\nKey: "{key}"', len(_PAIRS_INSTRUCTION)
        return Sample(task, index, context, question, (value,), max_new_tokens, begun, facts, start)

    return fit(setting, make)
