"""Passkey retrieval, as in landmark attention (arXiv:2305.16300): one number in sentences that say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload
from kvfold.bench.workloads.fill import Text, even_depth, fit
from kvfold.bench.workloads.matching import first_digits
from kvfold.bench.workloads.noise import SENTENCES, insert
from kvfold.bench.workloads.registry import workload

_MAX_KEY = 50_000
_INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)


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
        key, depth, filler = str(random.randint(1, _MAX_KEY)), even_depth(index), Text(cycle(SENTENCES))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."

        def make(num_words: int) -> Sample:
            context = f"{_INSTRUCTION}\n{insert([(depth, needle)], filler.take(num_words), ' ')}"
            question, begun = "\nWhat is the pass key?", "The pass key is"
            return Sample(task, index, context, question, (key,), 8, begun, {"depth": depth})

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        return float(first_digits(reply) == sample.answers[0])
