"""docs/results.md says what the rows that are kept say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.docs_section import with_section
from benchmarks.runs import page as results_page
from kvfold.bench.record import OWN
from tests.bench.report_runs import row, rows, write


def test_the_page_is_what_the_kept_runs_give() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, results_page.BEGIN, results_page.END, results_page.body())


def test_every_kept_run_has_tables_by_memory_and_tight_ones_by_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    full, small = rows("full", "100%", [1, 1]), rows("keydiff", "6.25%", [1, 0])
    int8 = [*rows("int8", "100%", [1, 1]), *(row("int8", "6.25%", None, i, note="too small") for i in (0, 1))]
    quest = [replace(row("quest", "93%", 1, i), memory=OWN) for i in (0, 1)]
    write(tmp_path / "tight_a", [*full, *small], suite="tight")
    write(tmp_path / "methods_a", [*full, *small, *int8], suite="methods")
    write(tmp_path / "methods_b", [*full, *int8, *quest], suite="methods")
    first, second, third = results_page.body().split("## ")[1:]
    assert "| Question-aware | 100% | 6.25% |" in first and "| `int8` | 100 ±0 | too small |" in first
    assert "| `full` | 100 ±0 | 100 ±0 |" in first and "| `keydiff` |  | 50 ±50 |" in first
    assert "| Question-aware | 100% | 6.25% | own |" in second and "| `quest` |  |  | 100 ±0 in 93% |" in second
    assert "| Question-aware | 6.25% |" in third and "| Question-aware, 6.25% | passkey |" in third
    assert all("6.25% | passkey" not in each for each in (first, second))
