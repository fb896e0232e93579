"""Conversations: facts are told once, at even depths, never answered before they are asked, and shared by requests."""

from __future__ import annotations

import re

import pytest

from kvfold.bench.workloads import Sample
from kvfold.bench.workloads.chat import NUM_FACTS, Chat
from tests.bench.workloads.tokens import setting

TOLD = re.compile(r"Please note that (\w+'s [a-z ]+) is (\d{4})\.")


def asked(sample: Sample) -> str:
    (found,) = re.findall(r"^User: What is (.*)\?$", sample.question)
    return str(found)


@pytest.mark.parametrize("task", Chat.tasks)
@pytest.mark.parametrize("index", range(NUM_FACTS))
def test_the_fact_is_told_once_at_its_depth(task: str, index: int) -> None:
    sample = Chat().sample(setting(2000), task, index)
    told = TOLD.findall(sample.context)
    assert len(dict(told)) == len(told) == NUM_FACTS
    assert dict(told)[asked(sample)] == sample.answers[0]
    place = sample.context.index(f"{asked(sample)} is {sample.answers[0]}") / len(sample.context)
    assert sample.facts["depth"] == (index + 0.5) / NUM_FACTS
    assert abs(place - (index + 0.5) / NUM_FACTS) < 0.1


@pytest.mark.parametrize("index", range(NUM_FACTS))
def test_questions_in_passing_come_after_their_fact_and_are_never_the_last_one(index: int) -> None:
    sample = Chat().sample(setting(2000), "turns", index)
    passing = re.findall(r"User: What is (.*)\?\nAssistant: It is (\d+)\.", sample.context)
    assert passing and asked(sample) not in dict(passing)
    for what, value in passing:
        assert sample.context.index(f"{what} is {value}") < sample.context.index(f"What is {what}?")
    assert sample.context.count(sample.answers[0]) == 1


def test_requests_share_a_conversation_and_ask_for_each_fact() -> None:
    samples = list(Chat().samples(setting(1500), 2 * NUM_FACTS, ["requests"]))
    first, second = samples[:NUM_FACTS], samples[NUM_FACTS:]
    assert len({sample.context for sample in first}) == len({sample.context for sample in second}) == 1
    assert first[0].context != second[0].context
    assert {asked(sample) for sample in first} == set(dict(TOLD.findall(first[0].context)))
    assert "Assistant: It is" not in first[0].context
    assert {sample.facts["conversation"] for sample in second} == {1}


def test_turns_are_conversations_of_their_own() -> None:
    samples = list(Chat().samples(setting(1500), NUM_FACTS, ["turns"]))
    assert len({sample.context for sample in samples}) == NUM_FACTS


@pytest.mark.parametrize("task", Chat.tasks)
def test_turns_end_where_they_say(task: str) -> None:
    sample = Chat().sample(setting(1500), task, 1)
    ends = sample.facts["turn_ends"]
    assert isinstance(ends, tuple) and ends[-1] == len(sample.context)
    starts = [sample.context.index("User: "), *ends[:-1]]
    turns = [sample.context[start:end] for start, end in zip(starts, ends, strict=True)]
    assert len(turns) == sample.facts["turns"]
    assert all(re.fullmatch(r"User: .+\nAssistant: .+\n\n", turn) for turn in turns)


@pytest.mark.parametrize(
    ("reply", "score"),
    [("4821", 1), ("It is 4821, not 1234.", 1), ("1234 or 4821", 0), ("48210", 0), ("unknown", 0), ("", 0)],
)
def test_the_first_number_counts(reply: str, score: float) -> None:
    assert Chat().score(Sample("turns", 0, "", "", ("4821",), 8), reply) == score
