"""The memory benchmark: a row for each system, and times of recall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory
from kvfold.errors import InputError, PolicyError


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    memory.main([*arguments, "--embedder", "hashed"])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_a_row_for_each_system_over_all_logs(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--facts", "12", "--sessions", "5", "--questions", "10", "--logs", "2", "--wording", "free")
    assert [row["system"] for row in found] == ["memory", "bm25", "full", "nothing"]
    assert {row["questions"] for row in found} == {20} and {row["wording"] for row in found} == {"free"}
    assert (found[2]["accuracy"], found[2]["recalled"], found[3]["accuracy"]) == (None, 1.0, 0.4)


@pytest.mark.filterwarnings("ignore:the sequence passes 1024 positions")
def test_a_model_answers_from_each_system_and_from_the_whole_log_under_every_policy(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    sizes = ["--facts", "6", "--sessions", "4", "--questions", "5", "--logs", "1", "--distractors", "0"]
    policies = ["--policies", "full; kvzip + global + 4x + int4", "--device", "cpu"]
    found = rows(capsys, "--model", str(tiny_llama), *sizes, *policies)
    assert [row["system"] for row in found] == ["memory", "bm25", "full", "nothing", "full"]
    assert [row["policy"] for row in found] == ["full"] * 4 + ["kvzip + global + 4x + int4"]
    assert found[2]["tokens"] == found[4]["tokens"] and all(row["accuracy"] is not None for row in found)


def test_senseless_numbers_and_policies_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--logs", "--sessions"):
        with pytest.raises(InputError, match="or more"):
            rows(capsys, "--model", "/nowhere", option, "0")
    with pytest.raises(PolicyError, match=r'no .* "int3"'):
        rows(capsys, "--model", "/nowhere", "--policies", "full; kvzip + 4x + int3")


def test_times_of_recall(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(capsys, "--speed", "200")
    assert row["facts"] == 250 and row["recalled"] == 1.0


def test_too_few_facts_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="give 200 facts or more"):
        rows(capsys, "--speed", "10")
