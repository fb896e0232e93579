"""Runs of the benchmark as one page that opens from disk: quality against memory, costs, losses, origins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvfold.bench.record import write_whole
from kvfold.bench.report.merge import read_sections
from kvfold.bench.report.page import page
from kvfold.errors import InputError

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Read the run folders and write the page, whole or not at all."""
    content = page(read_sections(runs))
    try:
        write_whole(out, content)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}); choose another place") from error
