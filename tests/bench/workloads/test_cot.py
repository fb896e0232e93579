"""Chains of thought: statements that lead to the answer, steps that are right, and the reading of a reply."""

from __future__ import annotations

import re

import pytest

from kvfold.bench.workloads import Sample
from kvfold.bench.workloads.cot import ChainOfThought, final_answer
from tests.bench.workloads.tokens import setting

START = re.compile(r"\b([A-Z]{4}) is (\d+)\.")
STEP = re.compile(r"\b([A-Z]{4}) is ([A-Z]{4}) (plus|minus|times) (\d+), modulo 97\.")
SAME = re.compile(r"\b([A-Z]{4}) is the same as ([A-Z]{4})\.")
TRACKED = Sample("track", 0, "", "", ("ABCD", "EFGH"), 8)
CHAINED = Sample("chain", 0, "", "", ("42",), 8, facts={"steps": ("ABCD = 5", "EFGH = 42")})


def solve(context: str) -> dict[str, int]:
    """The value of every variable, worked out from the statements in whatever order they stand."""
    values = {name: int(value) for name, value in START.findall(context)}
    rules = [(name, before, sign, int(by)) for name, before, sign, by in STEP.findall(context)]
    rules += [(name, before, "plus", 0) for name, before in SAME.findall(context)]
    while missing := [rule for rule in rules if rule[0] not in values]:
        for name, before, sign, by in missing:
            if before in values:
                base = values[before]
                found = {"plus": base + by, "minus": base - by, "times": base * by}[sign]
                values[name] = found if by == 0 else found % 97
    return values


@pytest.mark.parametrize("index", range(6))
def test_the_statements_lead_to_the_answer_through_the_steps(index: int) -> None:
    for task in ("chain", "readback"):
        sample = ChainOfThought().sample(setting(1500), task, index)
        values = solve(sample.context)
        steps = sample.facts["steps"]
        assert isinstance(steps, tuple)
        assert sorted(steps) == sorted(f"{name} = {value}" for name, value in values.items())
        assert len(steps) == sample.facts["num_steps"] == (4, 8, 16)[index % 3]
        first, last = (int(step.split(" = ")[1]) for step in (steps[0], steps[-1]))
        assert sample.answers == (str(last if task == "chain" else first + last),)


@pytest.mark.parametrize("index", range(3))
def test_all_variables_of_a_value_are_asked_for_among_three_chains(index: int) -> None:
    sample = ChainOfThought().sample(setting(2500), "track", index)
    values = solve(sample.context)
    (value,) = re.findall(r"have the value (\d+)\?", sample.question)
    assert len(set(values.values())) == 3
    assert {name for name, found in values.items() if found == int(value)} == set(sample.answers)
    assert len(sample.answers) == (4, 8, 16)[index % 3]


def test_statements_are_scattered_over_the_whole_text() -> None:
    samples = [ChainOfThought().sample(setting(2000), "chain", index) for index in range(2, 62, 3)]
    places = [found.start() / len(s.context) for s in samples for found in STEP.finditer(s.context)]
    assert len(places) == 20 * 15
    quarters = [sum(int(4 * place) == quarter for place in places) for quarter in range(4)]
    assert min(quarters) > 45 and max(quarters) < 105  # 75 each on average


@pytest.mark.parametrize(
    ("reply", "final"),
    [
        ("Answer: 42", "42"),
        ("x = 3\nAnswer: 7\nNo.\nAnswer: the value is 42.\nmore 99", "the value is 42."),
        ("Answer:\n42", "42"),
        ("42", ""),
        ("Answer:", ""),
    ],
)
def test_the_line_after_the_last_answer_counts(reply: str, final: str) -> None:
    assert final_answer(reply) == final


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Answer: 42", 1), ("Answer: 5 + 37 = 42", 1), ("Answer: 42 or 43", 0), ("Answer: 142", 0), ("42", 0), ("", 0)],
)
def test_the_last_number_of_the_answer_counts(reply: str, score: float) -> None:
    assert ChainOfThought().score(CHAINED, reply) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Answer: EFGH, ABCD", 1),
        ("Answer: ABCD ABCD", 2 / 3),
        ("Answer: ABCD, EFGH, WXYZ, QRST", 2 / 3),
        ("ABCD = 1\nEFGH = 1\nAnswer: none", 0),
        ("", 0),
    ],
)
def test_named_variables_are_scored_by_f1(reply: str, score: float) -> None:
    assert ChainOfThought().score(TRACKED, reply) == pytest.approx(score)
