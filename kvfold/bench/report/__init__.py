"""HTML report of benchmark runs, in one file: quality against memory, costs, regressions, provenance."""

from __future__ import annotations

from kvfold.bench.report.page import write_report

__all__ = ["write_report"]
