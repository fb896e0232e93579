"""docs/workloads.md shows the registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvfold.bench.workloads.listing import table

PAGE = Path(__file__).parents[3] / "docs" / "workloads.md"


def test_the_page_shows_the_table() -> None:
    """`python -m kvfold.bench.workloads.listing` prints what belongs there."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_tasks_that_need_files_are_in_brackets() -> None:
    (row,) = (row for row in table().splitlines() if row.startswith("| `ruler` |"))
    assert "fwe, (qa_1), (qa_2)" in row


def test_the_command_prints_the_table() -> None:
    command = [sys.executable, "-m", "kvfold.bench.workloads.listing"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{table()}\n"
