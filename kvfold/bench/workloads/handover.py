"""Three modules work one after the other: facts that the first has read are asked for in the third.

    first    the fact stands in what module 1 read, three fifths of the context
    second   the fact stands in what module 2 wrote, the rest

Eight samples share one context: what the third module is asked is not known when the context is handed over. A pipeline
that hands over text cuts it to what the next prompt has room for (`shorten(tail, 8192tok, keep=none)`); one that hands
over a KV cache compresses the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.chat import NUM_FACTS, Told, draw_facts
from kvfold.bench.workloads.fill import Planted, Text, fit, scatter

_NEW_TOKENS = 16
_FIRST_SHARE = 0.6  # of the sentences
_INTRODUCTION = "Three assistants work on one task, one after the other. Each knows what the ones before it know.\n\n"
_TITLES = (
    "Assistant 1 reads the sources:",
    "Assistant 2 checks them and writes down:",
    "Assistant 3 answers questions.",
)


@workload
@dataclass(frozen=True)
class Handover(Workload):
    name: ClassVar[str] = "handover"
    summary: ClassVar[str] = "facts that one module of a pipeline has read, asked for two modules later"
    source: ClassVar[str] = "own"
    metric: ClassVar[str] = "1 if the first number of the reply is the one told"
    differences: ClassVar[str] = "none"
    tasks: ClassVar[tuple[str, ...]] = ("first", "second")

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        run, asked = divmod(index, NUM_FACTS)
        random = Random(f"{setting.seed}/{self.name}/{task}/run/{run}")  # samples of a run have the same context
        told = draw_facts(random)
        filler = Text(setting.haystack(random))

        def make(num_words: int) -> Sample:
            context = _context(filler.take(num_words), told, module=self.tasks.index(task))
            return _ask(Sample(task, index, context, "", (), _NEW_TOKENS, "", {}, len(_INTRODUCTION)), told[0], run)

        return _ask(fit(setting, make), told[asked], run)

    def num_sharing(self, task: str) -> int:
        return NUM_FACTS

    def score(self, sample: Sample, reply: str) -> float:
        return float(re.findall(r"\d+", reply)[:1] == [sample.answers[0]])


def _context(sentences: Sequence[str], told: Sequence[Told], module: int) -> str:
    """What both modules read and wrote; facts stand at even depths of one of them."""
    cut = round(_FIRST_SHARE * len(sentences))
    parts = [list(sentences[:cut]), list(sentences[cut:])]
    parts[module] = scatter([Planted(fact.depth, fact.sentence) for fact in told], parts[module])
    texts = [f"{title}\n{' '.join(part)}" for title, part in zip(_TITLES[:2], parts, strict=True)]
    return _INTRODUCTION + "\n\n".join([*texts, _TITLES[2]])


def _ask(sample: Sample, fact: Told, run: int) -> Sample:
    facts = {"depth": fact.depth, "run": run}
    question, prefix = f"\nWhat is {fact.what}?", f"{fact.what} is"
    return replace(sample, question=question, answers=(fact.value,), reply_prefix=prefix, facts=facts)
