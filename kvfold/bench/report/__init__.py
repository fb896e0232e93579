"""HTML report of benchmark runs, in one file: quality against memory, costs, regressions, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvfold.atomic_io import write_whole
from kvfold.bench.report.merge import read_sections
from kvfold.bench.report.page import page

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Read the run folders and write the page, whole or not at all."""
    write_whole(out, page(read_sections(runs)))
