"""Rules: each can be obeyed and broken, any of them at once, and each is checked by itself."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvfold.bench.workloads import Sample
from kvfold.bench.workloads.instruct import RULES, Instruct, checks
from tests.bench.workloads.tokens import setting

WORDS = dict(zip(RULES, ("acorn", "badge", "cabin", "dagger", "eagle", "falcon", "garden", "harbor"), strict=True))


def ruled(*names: str) -> Sample:
    return Sample("five", 0, "", "", ("1234567",), 8, facts={"rules": tuple((name, WORDS[name]) for name in names)})


@pytest.mark.parametrize("count", range(1, len(RULES) + 1))
def test_any_rules_can_be_obeyed_at_once(count: int) -> None:
    for names in combinations(RULES, count):
        sample = ruled(*names)
        assert Instruct().score(sample, Instruct().oracle(sample)) == 1, names


@pytest.mark.parametrize(
    ("name", "obeying", "breaking"),
    [
        ("brackets", "It is [[1234567]].", "It is [1234567]."),
        ("brackets", "[[ 1234567 ]]", "[[the 1234567]]"),
        ("brackets", "[[1234567]]", "[[1234567]] [[1234567]]"),
        ("mention", "A badge, 1234567, badge!", "badge 1234567"),
        ("mention", "Badge badge 1234567", "badge badge badge 1234567"),
        ("begin", "Dear cabin, 1234567", "Hello dear cabin 1234567"),
        ("end", "1234567. Farewell dagger.", "1234567 farewell dagger friend"),
        ("commas", "It is 1234567.", "Well, 1234567."),
        ("lower", "it is 1234567.", "It is 1234567."),
        ("short", "1234567 " + "so " * 29, "1234567 " + "so " * 30),
        ("lines", "It is\n1234567\n", "It is 1234567"),
        ("lines", "It is\n1234567", "It\nis\n1234567"),
    ],
)
def test_each_rule_is_checked(name: str, obeying: str, breaking: str) -> None:
    sample = ruled(name)
    assert checks(sample, obeying) == {name: True, "answer": True}
    assert checks(sample, breaking) == {name: False, "answer": True}


def test_the_score_is_the_share_of_checks_passed() -> None:
    sample = ruled("commas", "lower", "lines")
    assert Instruct().score(sample, "It is,\nso to say, 1234567") == 2 / 4
    assert Instruct().score(sample, "no idea") == 2 / 4  # no comma, no capital
    assert Instruct().score(sample, " \n") == 0  # an empty reply obeys by accident


@pytest.mark.parametrize("task", Instruct.tasks)
def test_rules_stand_first_and_the_fact_at_an_even_depth(task: str) -> None:
    for index in range(10):
        sample = Instruct().sample(setting(1500), task, index)
        rules = sample.facts["rules"]
        assert isinstance(rules, tuple) and len(dict(rules)) == len(rules) == {"one": 1, "three": 3, "five": 5}[task]
        head, text = sample.context.split("\n\nHere is a text.\n\n")
        assert head.splitlines()[1:] == [
            f"{place}. {RULES[name].text.format(word=word)}" for place, (name, word) in enumerate(rules, 1)
        ]
        assert sample.facts["depth"] == (index + 0.5) / 10
        assert abs(text.index(sample.answers[0]) / len(text) - (index + 0.5) / 10) < 0.06


def test_all_rules_come_up() -> None:
    samples = Instruct().samples(setting(600), 20, ["five"])
    found = {name for sample in samples for name in checks(sample, "")}
    assert found == {*RULES, "answer"}
