"""The memory benchmark: a row for each system, and times of recall."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory
from kvfold.errors import InputError


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    memory.main([*arguments, "--embedder", "hashed"])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_a_row_for_each_system_over_all_logs(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--facts", "12", "--sessions", "5", "--questions", "10", "--logs", "2", "--wording", "free")
    assert [row["system"] for row in found] == ["memory", "bm25", "full", "nothing"]
    assert {row["questions"] for row in found} == {20} and {row["wording"] for row in found} == {"free"}
    assert (found[2]["accuracy"], found[2]["recalled"], found[3]["accuracy"]) == (None, 1.0, 0.4)


def test_times_of_recall(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(capsys, "--speed", "200")
    assert row["facts"] == 250 and row["recalled"] == 1.0


def test_too_few_facts_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="give 200 facts or more"):
        rows(capsys, "--speed", "10")
