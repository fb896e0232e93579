"""Needles in a haystack over depth and length: one, three, ten or a hundred numbers of one key, all asked for.

Several needles part the document into as many equal stretches; each lies at the same depth of its stretch, so needles
are even over one document, and over the samples every depth is tried. Needles and wording are RULER's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Planted, Text, even_depth, fit, scatter
from kvfold.bench.workloads.metrics import match_all
from kvfold.bench.workloads.words import numbers, pairs

_COUNTS = {"needles_1": 1, "needles_3": 3, "needles_10": 10, "needles_100": 100}


@workload
@dataclass(frozen=True)
class NeedleGrid(Workload):
    name: ClassVar[str] = "needle"
    summary: ClassVar[str] = "numbers hidden in prose, at every depth and length, from one to a hundred"
    source: ClassVar[str] = "needle in a haystack (Kamradt, 2023), with RULER's needles"
    metric: ClassVar[str] = "share of the numbers that occur in the reply"
    differences: ClassVar[str] = (
        "matched by substring instead of judged by a model; needles in even stretches instead of from one depth on"
    )
    tasks: ClassVar[tuple[str, ...]] = tuple(_COUNTS)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        depth, count = even_depth(index), _COUNTS[task]
        key, values = next(pairs(random)), tuple(islice(numbers(random), count))
        magic, text = Magic("numbers", (key,), count), Text(setting.haystack(random))
        needles = [
            Planted((stretch + depth) / count, magic.sentence(key, value)) for stretch, value in enumerate(values)
        ]
        wordiest = "".join(f"\n{i}. {value}" for i, value in enumerate(values, 1))  # way in which models list numbers
        max_new_tokens = 8 + setting.count_tokens(wordiest)
        facts = {"depth": depth, "needles": count}

        def make(num_words: int) -> Sample:
            context = magic.instruction + " ".join(scatter(needles, text.take(num_words)))
            start = len(magic.instruction)
            return Sample(task, index, context, magic.question, values, max_new_tokens, magic.begun, facts, start)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        return match_all(sample.answers, reply)


@dataclass(frozen=True)
class Magic:
    """Needles of one kind: "numbers", "uuids" or "words"."""

    kind: str
    keys: tuple[str, ...]  # asked for
    num_answers: int  # of all keys together

    def sentence(self, key: str, value: str) -> str:
        return f"One of the special magic {self.kind} for {key} is: {value}."

    @property
    def instruction(self) -> str:
        hidden = f"A special magic {self._noun} is" if self.num_answers == 1 else f"Some special magic {self._noun} are"
        return (
            f"{hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {self._noun} afterwards.\n"
        )

    @property
    def question(self) -> str:
        return f"\nWhat {'is' if self.num_answers == 1 else 'are all'} the {self._asked}?"

    @property
    def begun(self) -> str:
        return f"The {self._asked} {'is' if self.num_answers == 1 else 'are'}"

    @property
    def _asked(self) -> str:
        *first, last = self.keys
        listed = f"{', '.join(first)}, and {last}" if first else last
        return f"special magic {self._noun} for {listed} mentioned in the provided text"

    @property
    def _noun(self) -> str:
        return self.kind.removesuffix("s") if self.num_answers == 1 else self.kind
