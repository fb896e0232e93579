"""LongEval's line retrieval (LongChat, 2023): a register of named lines, and the value of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload
from kvfold.bench.workloads.fill import Supply, even_depth, fit
from kvfold.bench.workloads.matching import last_digits
from kvfold.bench.workloads.registry import workload
from kvfold.bench.workloads.words import pairs

_MAX_VALUE = 50_000
_INSTRUCTION = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)


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
        register = Supply((name, random.randint(1, _MAX_VALUE)) for name in pairs(random))
        depth = even_depth(index)

        def make(count: int) -> Sample:
            record = register.take(count)
            asked, value = record[int(depth * count)]
            context = _INSTRUCTION + "\n".join(f"line {name}: REGISTER_CONTENT is <{held}>" for name, held in record)
            question = f"\n\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {asked}? "
            facts = {"depth": depth, "lines": count}
            return Sample(task, index, context, question + "I need the number.", (str(value),), 32, facts=facts)

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        found = last_digits(reply)
        return float(found != "" and int(found) == int(sample.answers[0]))
