"""Key-value retrieval of "Lost in the Middle" (arXiv:2307.03172): a JSON object of uuids, and the value of one key.

No word of the context is predictable and every pair may be asked for, so whatever is dropped without the question is
missed: the hardest case for eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload
from kvfold.bench.workloads.fill import Supply, even_depth, fit
from kvfold.bench.workloads.matching import match_part
from kvfold.bench.workloads.registry import workload
from kvfold.bench.workloads.words import uuids

_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"


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
        source, depth = uuids(random), even_depth(index)
        supply = Supply(zip(source, source, strict=True))

        def make(count: int) -> Sample:
            pairs = supply.take(count)
            key, value = pairs[int(depth * count)]
            record = ",\n ".join(f'"{name}": "{held}"' for name, held in pairs)
            context = f"{_INSTRUCTION}{{{record}}}"
            facts = {"depth": depth, "pairs": count}
            return Sample(task, index, context, f'\n\nKey: "{key}"', (value,), 100, "Corresponding value:", facts)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        return match_part(sample.answers, reply)
