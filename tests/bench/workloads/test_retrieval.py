"""Needles, passkeys, lines, pairs and lists: where they lie, what is asked, and how replies are scored."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest

from kvfold.bench.workloads import Sample, find
from kvfold.errors import InputError
from tests.bench.workloads.tokens import setting, trained

LENGTH = 3072
EVEN = [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]


def depths(sample: Sample) -> list[float]:
    """Where the answers stand in the context, as shares of it."""
    return [sample.context.index(answer) / len(sample.context) for answer in sample.answers]


@pytest.mark.parametrize(
    ("name", "task"),
    [("needle", "needles_1"), ("passkey", "passkey"), ("lines", "lines"), ("kv", "kv")]
    + [("infinite", task) for task in ("passkey", "number_string", "kv_retrieval")],
)
def test_depths_spread_evenly(name: str, task: str) -> None:
    for index in (0, 3, 6, 9):
        sample, depth = find(name).sample(setting(8192), task, index), EVEN[index]
        assert sample.facts["depth"] == depth
        assert depths(sample) == [pytest.approx(depth, abs=0.06)]  # the instruction before them counts too


@pytest.mark.parametrize("num", [1, 3, 10, 100])
def test_needles_part_the_document_evenly(num: int) -> None:
    sample = find("needle").sample(setting(LENGTH), f"needles_{num}", 4)
    assert len(sample.answers) == num == sample.facts["needles"]
    assert depths(sample) == sorted(depths(sample))
    assert depths(sample) == pytest.approx([(i + 0.45) / num for i in range(num)], abs=0.06)


def test_needles_are_rulers() -> None:
    workload = find("needle")
    sample = workload.sample(setting(LENGTH), "needles_3", 0)
    key = re.search(r"numbers for (\S+) mentioned", sample.question)
    assert key is not None
    for value in sample.answers:
        assert f"One of the special magic numbers for {key[1]} is: {value}." in sample.context
    reply = f"{sample.answers[2]} and {sample.answers[0]}"
    assert workload.score(sample, reply) == 2 / 3


def test_a_reply_has_room_for_all_needles() -> None:
    sample = find("needle").sample(setting(LENGTH), "needles_10", 0)
    listed = "".join(f"\n{i}. {value}" for i, value in enumerate(sample.answers, 1))
    assert trained()(listed) < sample.max_new_tokens < 2 * trained()(listed)


def test_a_hundred_needles_need_their_room() -> None:
    with pytest.raises(
        InputError, match=r"prompts of 1024 tokens are too short for needles_100; give .* at least \d{4}"
    ):
        find("needle").sample(setting(1024), "needles_100", 0)


def test_passkey_scores_the_first_number() -> None:
    workload = find("passkey")
    sample = replace(workload.sample(setting(1024), "passkey", 0), answers=("4213",))
    assert workload.score(sample, " 4213. Remember it, not 99.") == 1
    assert workload.score(sample, " 42134") == workload.score(sample, "99 or 4213") == 0


def test_lines_scores_the_last_number() -> None:
    workload = find("lines")
    sample = replace(workload.sample(setting(1024), "lines", 0), answers=("2416",))
    assert workload.score(sample, "The <REGISTER_CONTENT> in line torpid-kid is <2416>.") == 1
    assert workload.score(sample, "It is 2416, line 7") == workload.score(sample, "24160") == 0


def test_lines_differ_and_the_asked_one_holds_the_answer() -> None:
    sample = find("lines").sample(setting(LENGTH), "lines", 3)
    record = dict(re.findall(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", sample.context, re.MULTILINE))
    assert len(record) == sample.facts["lines"]
    assert record[sample.question.split("in line ")[1].split("?")[0]] == sample.answers[0]


@pytest.mark.parametrize(("name", "task"), [("kv", "kv"), ("infinite", "kv_retrieval")])
def test_pairs_are_one_object_that_holds_the_answer(name: str, task: str) -> None:
    sample = find(name).sample(setting(LENGTH), task, 3)
    record = dict(re.findall(r'"([0-9a-f-]{36})": "([0-9a-f-]{36})"', sample.context))
    assert len(record) == sample.facts["pairs"]
    assert record[sample.question.split('"')[1]] == sample.answers[0]


def test_pairs_are_scored_by_substring_or_by_word() -> None:
    kv, infinite = find("kv"), find("infinite")
    sample = Sample("kv_retrieval", 0, "", "", ("ab-12",), 1)
    assert kv.score(sample, '"AB-12x"') == 1 and infinite.score(sample, '"ab-12x"') == 0
    assert infinite.score(sample, '{"k": "ab-12"}.') == 1 and infinite.score(sample, "AB-12") == 0


def test_digits_are_scored_as_strings() -> None:
    workload = find("infinite")
    sample = Sample("passkey", 0, "", "", ("00412",), 1)
    assert workload.score(sample, " 00412 is") == 1 and workload.score(sample, "412") == 0


def test_number_strings_double_five_digits() -> None:
    for sample in find("infinite").samples(setting(1024), 10, ["number_string"]):
        assert len(sample.answers[0]) == 10 and sample.context.count(sample.answers[0]) == 2
        neighbours = zip(sample.answers[0], sample.answers[0][1:], strict=False)
        assert sum(first == second for first, second in neighbours) >= 5


def test_math_find_asks_for_seven_statistics_in_turn() -> None:
    workload = find("infinite")
    for sample in workload.samples(setting(1024), 14, ["math_find"]):
        values = [int(value) for value in sample.context.split("[")[1].rstrip("]").split(", ")]
        ranked = sorted(set(values))
        found = {
            "largest": ranked[-1],
            "second largest": ranked[-2],
            "third largest": ranked[-3],
            "median": median(values),
        }
        found |= {"smallest": ranked[0], "second smallest": ranked[1], "third smallest": ranked[2]}
        sought = str(sample.facts["sought"])
        assert sought == f"{tuple(_ORDER)[sample.index % 7]} number" and f"the {sought} from the list" in sample.context
        assert float(sample.answers[0]) == found[sought.removesuffix(" number")]


_ORDER = ("largest", "second largest", "third largest", "smallest", "second smallest", "third smallest", "median")


def test_math_find_scores_the_first_number() -> None:
    workload = find("infinite")
    whole, half = (Sample("math_find", 0, "", "", (answer,), 1) for answer in ("49", "49.5"))
    assert workload.score(whole, " 49.") == workload.score(whole, "49.0") == workload.score(half, "49.5, or 3") == 1
    assert workload.score(whole, "49.5") == workload.score(half, "49") == workload.score(whole, "3, 49") == 0
