"""Samples, settings and the registry: what is refused, and how tasks take turns."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import pytest

from kvfold.bench.workloads import Sample, Setting, Workload, find, workload, workloads
from kvfold.errors import InputError


@dataclass(frozen=True)
class Echo(Workload):
    file: str = ""

    name: ClassVar[str] = "echo"
    tasks: ClassVar[tuple[str, ...]] = ("one", "two", "filed")

    def lacks(self, task: str) -> str:
        return "" if self.file or task != "filed" else "file=FILE, any text"

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        return Sample(task, index, "context", f" {random.random()}", ("answer",), 4)

    def score(self, sample: Sample, reply: str) -> float:
        return float(reply in sample.answers)


SETTING = Setting(100, 0, len)


def test_tasks_take_turns_and_those_that_lack_something_are_left_out() -> None:
    found = [(sample.task, sample.index) for sample in Echo().samples(SETTING, 2)]
    assert found == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    assert [sample.task for sample in Echo("here").samples(SETTING, 1)] == ["one", "two", "filed"]
    assert [sample.task for sample in Echo().samples(SETTING, 2, ["two"])] == ["two", "two"]


def test_named_tasks_are_refused_at_once_by_name() -> None:
    with pytest.raises(InputError, match='echo has no task "three"; tasks: one, two, filed'):
        Echo().samples(SETTING, 1, ["one", "three"])
    with pytest.raises(InputError, match="task filed of workload echo needs file=FILE, any text"):
        Echo().samples(SETTING, 1, ["filed"])
    with pytest.raises(InputError, match="needs file=FILE"):
        Echo().sample(SETTING, "filed", 0)


def test_tasks_and_seeds_draw_apart() -> None:
    samples = [
        Echo().sample(Setting(100, seed, len), task, i) for seed in (0, 1) for task in ("one", "two") for i in (0, 1)
    ]
    assert len({sample.question for sample in samples}) == 8


def test_the_text_of_a_sample_is_its_whole_prompt() -> None:
    assert Sample("t", 0, "Context.", "\nWhat?", ("a",), 1).text == "Context.\nWhat?"
    assert Sample("t", 0, "Context.", "\nWhat?", ("a",), 1, "It is").text == "Context.\nWhat?\n\nIt is"


def test_a_length_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="prompts of 0 tokens"):
        Setting(0, 0, len)


def test_workloads_are_sorted_and_found_by_name() -> None:
    names = [found.name for found in workloads()]
    assert names == sorted(names) and {"needle", "ruler", "lines", "kv", "passkey", "infinite"} <= set(names)
    assert find("kv") == next(found for found in workloads() if found.name == "kv")
    with pytest.raises(InputError, match=r'no workload "haystack"; workloads: .*kv, lines.*, needle'):
        find("haystack")
    with pytest.raises(InputError, match='ruler has no option "squadd"; options: squad, hotpot'):
        find("ruler", squadd="file")
    with pytest.raises(InputError, match='kv has no option "file"; options: none'):
        find("kv", file="file")


def test_a_name_belongs_to_one_class() -> None:
    @dataclass(frozen=True)
    class Other(Echo):
        name: ClassVar[str] = "kv"

    places = r"kvfold\.bench\.workloads\.\w+\.KeyValue and tests\."
    with pytest.raises(InputError, match=f'"kv" is registered twice, by {places}'):
        workload(Other)


def test_a_workload_is_a_dataclass() -> None:
    class Plain(Workload):
        name: ClassVar[str] = "plain"

    with pytest.raises(InputError, match='"plain": Plain must be a frozen dataclass'):
        workload(Plain)
