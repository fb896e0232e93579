"""The benchmark of reading by parts: texts have their facts, arms run, and what takes too long is predicted only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commands import run_main
from benchmarks.recurse import main
from benchmarks.recurse_arms import Arm, right
from benchmarks.recurse_text import planted
from kvfold.shortening.tokens import TokenOffsets
from tests.recurse.texts import save


@pytest.mark.parametrize("length", [300, 5000])
def test_a_text_has_its_length_and_the_answer_once(length: int) -> None:
    asked = planted(length, 0)
    assert 0.9 * length < len(TokenOffsets.of(asked.text)) < 1.1 * length + 20
    thing = asked.question.removeprefix("What is ").removesuffix("?")
    assert asked.text.count(f"Please note that {thing} is {asked.answer}.") == 1
    assert asked.text.count("Please note that") == max(1, length // 1000)
    assert planted(length, 0) == asked != planted(length, 1)


@pytest.mark.parametrize(("answer", "expected"), [("It is 4410.", True), ("44101", False), ("1234, not 4410", False)])
def test_the_first_number_counts(answer: str, expected: bool) -> None:
    assert right(answer, "4410") is expected


def test_predicted_tokens_grow_with_what_an_arm_reads() -> None:
    tokens = [Arm(kind).num_tokens(100_000, 4_000, 8_192, 300) for kind in ("recursive", "sequential", "truncated")]
    assert tokens == [100_000 + 25 * 75, 100_000 + 25 * 300, 8_192]
    assert Arm("recursive", "kvzip + 8x").num_tokens(100_000, 4_000, 8_192, 300) == 200_000 + 25 * 75


def _rows(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> list[dict[str, object]]:
    arguments = ["--model", str(folder), "--lengths", "700", "--samples", "2", "--chunk", "400", "--memory", "64MB"]
    assert run_main(main, [*arguments, "--device", "cpu", *more]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_every_arm_runs_and_one_that_fails_loses_no_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = _rows(capsys, save(tmp_path), "--policies", "full; shorten(rank, 2x); keydiff + 2x")
    arms = [(row["arm"], row.get("policy"), row.get("sample")) for row in found[2:]]
    policies = ("full", "shorten(rank, 2x)", "keydiff + 2x")
    first = [("shorten", "full", 0), ("truncated", "full", 0), *(("recursive", policy, 0) for policy in policies)]
    again = [(kind, policy, 1) for kind, policy, _ in first if policy != "shorten(rank, 2x)"]
    assert [row["arm"] for row in found[:2]] == ["speed", "sharing"]
    assert arms == [*first, ("sequential", "full", 0), *again]
    failed = [row for row in found if "error" in row]
    assert [row["policy"] for row in failed] == ["shorten(rank, 2x)"] and "PolicyError" in str(failed[0]["error"])
    assert all(row["calls"] for row in found[1:] if row not in failed) and found[1]["factor"]
    calls = {(row["arm"], row["policy"]): row["calls"] for row in found[2:] if row not in failed}
    assert calls["shorten", "full"] == calls["truncated", "full"] == 1
    assert calls["recursive", "full"] != 1 != calls["recursive", "keydiff + 2x"]


def test_an_arm_without_time_is_predicted_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = _rows(capsys, save(tmp_path), "--minutes", "0")
    assert [row["arm"] for row in found] == ["speed", "shorten", "truncated", "recursive", "recursive", "sequential"]
    assert all(row["predicted_s"] and "calls" not in row for row in found[1:])
