"""docs/results.md says what the rows that are kept say."""

from __future__ import annotations

from benchmarks import results_page
from kvfold.bench.page import written
from kvfold.bench.report.merge import read_sections


def test_the_page_is_what_the_kept_runs_give() -> None:
    folder = results_page.ROOT / "benchmarks" / "results"
    body = results_page.body(read_sections([folder / name for name in results_page.RUNS]))
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert page == written(page, results_page.BEGIN, results_page.END, body)
