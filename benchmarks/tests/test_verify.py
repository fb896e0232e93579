"""The benchmark of checked steps: sums with and without checks, and a long chain in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import run_main
from benchmarks.sums import prompt, result_is
from benchmarks.verify import main

pytestmark = pytest.mark.filterwarnings("ignore:the sequence passes 1024 positions")


def rows(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> list[dict[str, Any]]:
    assert run_main(main, ["--model", str(folder), "--device", "cpu", *more]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_every_arm_reports_what_checks_cost(capsys: pytest.CaptureFixture[str], tiny_llama: Path) -> None:
    none, resample, reason = rows(capsys, tiny_llama, "--chains", "1", "--numbers", "3")
    assert [row["arm"] for row in (none, resample, reason)] == ["none", "resample", "reason"]
    assert (none["retries"], none["wasted"], none["lines"]) == (0, 0.0, 2)
    for checked in (resample, reason):
        assert checked["failed"] == 2 and checked["retries"] == 6, "noise computes nothing"
        assert checked["wasted"] > 0.5 and checked["generated"] > none["generated"]


def test_a_long_chain_stays_below_its_bound_and_the_full_cache_does_not(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    compressed, full = rows(capsys, tiny_llama, "--long", "8000")
    assert min(compressed["tokens"], full["tokens"]) >= 8000
    assert compressed["steps"] == full["steps"] >= 7
    assert compressed["held_bytes"] <= compressed["peak_bytes"] < compressed["bound_bytes"]
    assert full["peak_bytes"] >= 7 * full["bound_bytes"]


def test_a_prompt_ends_with_the_numbers_to_add() -> None:
    assert prompt([3, 4, 9]).endswith("\n\nNumbers: 3, 4, 9\n")
    assert "12 + 8 = 20\n" in prompt([3, 4])


@pytest.mark.parametrize(("text", "expected"), [("7 + 5 = 12", True), ("5 + 7 = 12 ", True), ("12", False)])
def test_the_result_is_what_stands_behind_the_equation(text: str, expected: bool) -> None:
    assert result_is(12)(text) is expected


@pytest.mark.parametrize("given", [["--long", "100"], ["--chains", "0"], ["--numbers", "1"], ["--largest", "1"]])
def test_senseless_numbers_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    assert run_main(main, ["--model", "/nowhere", *given]) == 1
    assert "give" in capsys.readouterr().err
