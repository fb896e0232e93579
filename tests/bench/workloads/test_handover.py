"""Hand-overs: facts stand in one module, once, and all samples of a run ask about the same context."""

from __future__ import annotations

import re

import pytest

from kvfold.bench.workloads.chat import NUM_FACTS
from kvfold.bench.workloads.handover import Handover
from tests.bench.workloads.tokens import setting


@pytest.mark.parametrize(("task", "module"), [("first", 1), ("second", 2)])
def test_facts_stand_in_their_module_and_are_asked_in_the_third(task: str, module: int) -> None:
    samples = list(Handover().samples(setting(2000), 2 * NUM_FACTS, [task]))
    assert len({sample.context for sample in samples[:NUM_FACTS]}) == 1
    assert samples[0].context != samples[NUM_FACTS].context
    for sample in samples:
        told = re.split(r"Assistant \d ", sample.context)
        assert len(told) == 4 and len(told[1]) > len(told[2]) > len(told[3])
        (asked,) = re.findall(r"What is (.*)\?", sample.question)
        assert f"{asked} is {sample.answers[0]}." in told[module]
        assert len(re.findall(rf"\b{sample.answers[0]}\b", sample.context)) == 1
        assert sample.context.endswith("Assistant 3 answers questions.")
    assert len({sample.question for sample in samples[:NUM_FACTS]}) == NUM_FACTS


def test_only_the_first_number_counts() -> None:
    sample = Handover().sample(setting(2000), "first", 0)
    workload, value = Handover(), sample.answers[0]
    assert workload.score(sample, f" {value}.") == 1
    assert workload.score(sample, f" 17 or {value}") == 0
