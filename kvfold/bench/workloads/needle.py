"""Needles in a haystack over depth and length: one, three, ten or a hundred numbers of one key, all asked for.

Several needles part the document into as many equal stretches; each lies at the same depth of its stretch, so needles
are even over one document, and over the samples every depth is tried. Needles and wording are RULER's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload
from kvfold.bench.workloads.fill import Text, even_depth, fit
from kvfold.bench.workloads.magic import Magic
from kvfold.bench.workloads.matching import match_all
from kvfold.bench.workloads.plant import Planted, scatter
from kvfold.bench.workloads.registry import workload
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
        max_new_tokens = 8 + setting.count_tokens(_longest(values))
        facts = {"depth": depth, "needles": count}

        def make(num_words: int) -> Sample:
            context = magic.instruction + " ".join(scatter(needles, text.take(num_words)))
            return Sample(task, index, context, magic.question, values, max_new_tokens, magic.begun, facts)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        return match_all(sample.answers, reply)


def _longest(values: Sequence[str]) -> str:
    """The wordiest way in which models list numbers."""
    return "".join(f"\n{i}. {value}" for i, value in enumerate(values, 1))
