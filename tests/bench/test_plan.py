"""Tasks by name, batches in turns and by shard, options of workloads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.bench.plan import Shard, batches, digests, tasks, workload_options
from kvfold.bench.suites import SUITES
from kvfold.bench.workloads import workloads
from kvfold.errors import InputError


def test_a_workload_is_all_that_is_ready_and_a_task_is_itself() -> None:
    labels = [task.label for task in tasks(["rag", "ruler:vt", "ruler:vt", "kv"], {})]
    rag = ["rag:planted", "rag:planted_0", "rag:planted_50", "rag:planted_90"]
    assert labels == [*rag, "ruler:vt", "kv:kv"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("nothing", "no workload"), ("kv:nothing", 'no task "nothing"'), ("ruler:qa_1", "needs"), ("longbench", "needs")],
)
def test_what_cannot_run_is_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        tasks([name], {})


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_suites_name_tasks_that_run_without_files(suite: object) -> None:
    assert tasks(suite.workloads, {})  # type: ignore[attr-defined]


def test_standard_has_six_workloads_or_more() -> None:
    assert len({task.workload.name for task in tasks(SUITES["standard"].workloads, {})}) >= 6


def test_every_workload_can_be_planned() -> None:
    names = [each.name for each in workloads() if each.ready]
    assert {batch.task.workload.name for batch in batches(tasks(names, {}), [1000], 1, 1)} == set(names)


def test_batches_take_turns_and_shards_part_them() -> None:
    found = batches(tasks(["kv", "lines"], {}), [500, 900], 3, 1)
    assert [(batch.task.name, batch.length, batch.indices) for batch in found[:5]] == [
        ("kv", 500, (0,)),
        ("lines", 500, (0,)),
        ("kv", 900, (0,)),
        ("lines", 900, (0,)),
        ("kv", 500, (1,)),
    ]
    assert len(found) == 2 * 2 * 3
    parts = [batches(tasks(["kv", "lines"], {}), [500, 900], 3, 1, Shard(index, 5)) for index in range(5)]
    assert sorted(found.index(batch) for part in parts for batch in part) == list(range(len(found)))


def test_samples_that_share_a_context_stay_together() -> None:
    requests = tasks(["chat:requests"], {})
    assert [batch.indices for batch in batches(requests, [900], 11, 1)] == [tuple(range(8)), (8, 9, 10)]
    assert [batch.indices for batch in batches(requests, [900], 16, 20)] == [tuple(range(16))]
    assert [batch.indices for batch in batches(tasks(["kv"], {}), [900], 5, 3)] == [(0, 1, 2), (3, 4)]


def test_a_task_ends_with_its_file(tmp_path: Path) -> None:
    rows = '{"question": "q", "answers": ["a"], "ctxs": [{"title": "t", "text": "x"}]}\n' * 3
    path = tmp_path / "passages.jsonl"
    path.write_text(rows)
    options = workload_options([f"rag.passages={path}"])
    found = batches(tasks(["rag:passages"], options), [900], 10, 2)
    assert [batch.indices for batch in found] == [(0, 1), (2,)]
    assert digests(options)["rag.passages"].startswith("passages.jsonl ")
    before = digests(options)
    path.write_text(rows * 2)
    assert digests(options) != before


@pytest.mark.parametrize("text", ["rag", "rag=FILE", "rag.passages", ".x=1"])
def test_options_have_a_form(text: str) -> None:
    with pytest.raises(InputError):
        workload_options([text])


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InputError, match='rag has no option "colour"'):
        tasks(["rag"], workload_options(["rag.colour=red"]))


@given(num_shards=st.integers(1, 20), item=st.integers(0, 10_000))
def test_every_item_has_exactly_one_shard(num_shards: int, item: int) -> None:
    assert sum(Shard(index, num_shards).takes(item) for index in range(num_shards)) == 1


def test_a_shard_is_written_as_it_is_read() -> None:
    shard = Shard.parse("3/12")
    assert shard == Shard(3, 12) and str(shard) == "3/12"
    assert [item for item in range(30) if shard.takes(item)] == [3, 15, 27]


def test_everything_is_the_default() -> None:
    assert all(map(Shard().takes, range(5)))


@pytest.mark.parametrize("text", ("3", "a/b", "-1/4", "1/4/2", ""))
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no shard; write I/N"):
        Shard.parse(text)


@pytest.mark.parametrize("text", ("4/4", "0/0"))
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"shard {text} does not exist"):
        Shard.parse(text)
