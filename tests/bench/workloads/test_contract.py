"""What holds for every task of every workload: perfect replies, empty ones, and samples that stand alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvfold.bench.workloads import Sample, Workload, find, workloads
from tests.bench.workloads.given import options
from tests.bench.workloads.tokens import setting, smollm2, trained

CASES = [(workload.name, task) for workload in workloads() for task in workload.tasks]
LENGTH = 1024
# Tokens of the longest unit a task is filled with, where half of one may be more than 2 % of a thousand tokens.
UNITS = {
    "kv": 90,
    "kv_retrieval": 90,
    "niah_multikey_3": 110,
    "qa_1": 200,
    "qa_2": 200,
    "musique": 150,
    "passages": 150,
}
SIZED = [
    (name, task)
    for name, task in CASES
    if name != "longbench"  # documents have the length they have; the setting's is the most
]
FIRST = [(workload.name, workload.tasks[0]) for workload in workloads() if workload.name != "longbench"]


class Given:
    """Workloads with all the files that they read, and three samples of each task, built once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workload = cache(self.fresh)
        self.samples = cache(self._samples)

    def fresh(self, name: str) -> Workload:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return find(name, **options(name, folder))

    def _samples(self, name: str, task: str) -> list[Sample]:
        workload = self.workload(name)
        if workload.lacks(task):
            pytest.skip(f"{task} {workload.lacks(task)}: has its own tests")
        return list(workload.samples(setting(length_of(task)), 3, [task]))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("given"))


def length_of(task: str) -> int:
    return 3 * LENGTH if task == "needles_100" else LENGTH  # where they fit


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_perfect_reply_scores_one_and_nothing_scores_by_itself(name: str, task: str, given: Given) -> None:
    """Neither an empty reply nor what the reply begins with."""
    workload = given.workload(name)
    for sample in given.samples(name, task):
        assert workload.score(sample, workload.oracle(sample)) == 1
        assert workload.score(sample, "") == 0
        assert workload.score(sample, sample.reply_prefix) < 1
        assert sample.max_new_tokens > 0


@pytest.mark.parametrize(("name", "task"), CASES)
def test_samples_depend_on_seed_task_and_index_alone(name: str, task: str, given: Given) -> None:
    many = given.samples(name, task)
    assert len({sample.text for sample in many}) == 3
    assert [(sample.task, sample.index) for sample in many] == [(task, 0), (task, 1), (task, 2)]
    assert given.fresh(name).sample(setting(length_of(task)), task, 2) == many[2]
    others = given.workload(name).samples(setting(length_of(task), seed=1), 3, [task])
    differ = [other.text != sample.text for other, sample in zip(others, many, strict=True)]
    assert any(differ) if name == "longbench" else all(differ)  # two orders of few rows may agree at an index


@pytest.mark.parametrize(("name", "task"), SIZED)
def test_prompts_have_the_wanted_length(name: str, task: str, given: Given) -> None:
    near, far = given.samples(name, task), given.workload(name).sample(setting(4 * LENGTH), task, 0)
    for sample, length in [(each, length_of(task)) for each in near] + [(far, 4 * LENGTH)]:
        assert abs(trained()(sample.text) - length) <= allowed(task, length)


@pytest.mark.model
@pytest.mark.parametrize(("name", "task"), FIRST)
def test_prompts_have_the_wanted_length_for_smollm2(name: str, task: str, given: Given) -> None:
    sample = given.workload(name).sample(setting(4 * LENGTH, count_tokens=smollm2()), task, 0)
    assert abs(smollm2()(sample.text) - 4 * LENGTH) <= allowed(task, 4 * LENGTH)


def allowed(task: str, length: int) -> float:
    return max(0.02 * length, UNITS.get(task, 0) / 2)


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: workload.name)
def test_each_workload_says_what_it_is(workload: Workload) -> None:
    for line in (workload.summary, workload.source, workload.metric, workload.differences):
        assert line and "\n" not in line and "|" not in line and not line.endswith(".")
    assert len(set(workload.tasks)) == len(workload.tasks) > 0
