"""`kvfold demo`: judges answers by the expected word, and says what failed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvfold.cli.answers import Answer
from kvfold.cli.demo import CASES, EXPECTED, Case, is_right, summary
from kvfold.policy import Policy
from kvfold.reply import Reply
from kvfold.stats import Stats
from tests.cli.conftest import Call


def _answers(case: Case, held: int, *texts: str) -> list[Answer]:
    stats = Stats(1000, held, 8_000_000, held, [[500]], prefill_s=1.5)
    policy = Policy.parse(case.policy)
    return [
        Answer(policy, case.question_known, question, Reply(text, [1], "eos", stats, 2.0), stats, True)
        for question, text in zip(EXPECTED, texts, strict=True)
    ]


RIGHT = tuple(f"It is {word}." for word in EXPECTED.values())


def test_an_answer_is_right_when_it_holds_the_expected_word() -> None:
    both = _answers(CASES[0], 1, *RIGHT)
    assert all(map(is_right, both))
    assert not is_right(_answers(CASES[0], 1, RIGHT[1], RIGHT[0])[0])


def test_the_summary_is_of_the_smallest_cache_that_answered_all() -> None:
    small, large, lossy = Case("int4"), Case("full"), Case("streaming + 4x", question_known=True)
    results = {
        large: _answers(large, 8_000_000, *RIGHT),
        small: _answers(small, 2_000_000, *RIGHT),
        lossy: _answers(lossy, 1_000_000, RIGHT[0], "no idea"),
    }
    assert summary(results) == (
        "2 of 3 policies answered both questions; the smallest cache of these (int4) holds 2.0 MB where an ordinary "
        "bf16 cache of 1000 tokens holds 8.0 MB, 4.0 times as much; a fact was lost by streaming + 4x (question known)."
    )


def test_all_that_lost_a_fact_are_named() -> None:
    lossy = [Case("streaming + 2x"), Case("streaming + 4x"), Case("streaming + 8x")]
    told = summary({case: _answers(case, 1, "no", "no") for case in lossy})
    assert told.endswith("a fact was lost by streaming + 2x, streaming + 4x and streaming + 8x.")


def test_a_summary_without_success_says_so() -> None:
    assert summary({CASES[0]: _answers(CASES[0], 1, "no", "no")}).startswith("No policy answered both questions")


def test_the_full_cache_comes_first_and_every_policy_parses() -> None:
    assert CASES[0] == Case("full")
    for case in CASES:
        Policy.parse(case.policy)
    assert len({dataclasses.astuple(case) for case in CASES}) == len(CASES)


def test_a_random_model_is_shown_to_fail(call: Call, folder: Path) -> None:
    done = call("demo", "--model", folder)
    assert done.code == 0
    assert done.err.startswith("warning: the sequence passes 1024 positions") and done.err.count("\n") == 1
    assert done.out.count("wrong:") == 2 * len(CASES)
    assert "right:" not in done.out
    assert done.out.rstrip().splitlines()[-1].startswith("No policy answered both questions")


def test_json(call: Call, folder: Path) -> None:
    rows = json.loads(call("demo", "--model", folder, "--json").out)
    assert [(row["policy"], row["question"]) for row in rows] == [
        (Policy.parse(case.policy).short, question) for case in CASES for question in EXPECTED
    ]
    assert {row["is_right"] for row in rows} == {False}


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_answers_with_the_full_cache_and_with_int4(call: Call) -> None:
    rows = json.loads(call("demo", "--json").out)
    wrong = {row["policy"] for row in rows if not row["is_right"]}
    assert "streaming + 4x" in wrong
    assert wrong.isdisjoint({"full", "int8", "int4"})
