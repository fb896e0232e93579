"""What holds for every task of every workload: perfect replies, empty ones, and samples that stand alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.bench.workloads import Workload, find, workloads
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
    (workload.name, task, length)
    for workload in workloads()
    if workload.name != "longbench"  # documents have the length they have; the setting's is the most
    for task in workload.tasks
    for length in (1024, 4096)
    if (task, length) != ("needles_100", 1024)
]


def length_of(task: str) -> int:
    return 3 * LENGTH if task == "needles_100" else LENGTH  # where they fit


def ready(name: str, task: str, folder: Path) -> Workload:
    found = find(name, **options(name, folder))
    if found.lacks(task):
        pytest.skip(f"{task} {found.lacks(task)}: has its own tests")
    return found


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_perfect_reply_scores_one_and_an_empty_one_zero(name: str, task: str, tmp_path: Path) -> None:
    workload = ready(name, task, tmp_path)
    for sample in workload.samples(setting(length_of(task)), 3, [task]):
        assert workload.score(sample, workload.oracle(sample)) == 1
        assert workload.score(sample, "") == 0


@pytest.mark.parametrize(("name", "task"), CASES)
def test_samples_depend_on_seed_task_and_index_alone(name: str, task: str, tmp_path: Path) -> None:
    workload = ready(name, task, tmp_path)
    many = list(workload.samples(setting(length_of(task)), 3, [task]))
    assert workload.sample(setting(length_of(task)), task, 2) == many[2]
    assert list(find(name, **options(name, tmp_path)).samples(setting(length_of(task)), 3, [task])) == many
    assert len({sample.text for sample in many}) == 3
    assert [(sample.task, sample.index) for sample in many] == [(task, 0), (task, 1), (task, 2)]
    others = workload.samples(setting(length_of(task), seed=1), 3, [task])
    differ = [other.text != sample.text for other, sample in zip(others, many, strict=True)]
    assert any(differ) if name == "longbench" else all(differ)  # two orders of few rows may agree at an index


@pytest.mark.parametrize(("name", "task"), CASES)
def test_the_answer_is_not_given_away(name: str, task: str, tmp_path: Path) -> None:
    """Neither the question nor what the reply begins with scores by itself."""
    workload = ready(name, task, tmp_path)
    sample = workload.sample(setting(length_of(task)), task, 0)
    assert workload.score(sample, sample.reply_prefix) < 1
    assert sample.max_new_tokens > 0


@pytest.mark.parametrize(("name", "task", "length"), SIZED)
def test_prompts_have_the_wanted_length(name: str, task: str, length: int, tmp_path: Path) -> None:
    workload = ready(name, task, tmp_path)
    for sample in workload.samples(setting(length), 3, [task]):
        allowed = max(0.02 * length, UNITS.get(task, 0) / 2)
        assert abs(trained()(sample.text) - length) <= allowed


@pytest.mark.model
@pytest.mark.parametrize(("name", "task", "length"), [case for case in SIZED if case[2] == 4096])
def test_prompts_have_the_wanted_length_for_smollm2(name: str, task: str, length: int, tmp_path: Path) -> None:
    workload = ready(name, task, tmp_path)
    sample = workload.sample(setting(length, count_tokens=smollm2()), task, 0)
    assert abs(smollm2()(sample.text) - length) <= max(0.02 * length, UNITS.get(task, 0) / 2)


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: workload.name)
def test_each_workload_says_what_it_is(workload: Workload) -> None:
    for line in (workload.summary, workload.source, workload.metric, workload.differences):
        assert line and "\n" not in line and "|" not in line and not line.endswith(".")
    assert len(set(workload.tasks)) == len(workload.tasks) > 0
