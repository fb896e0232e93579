"""docs/results.md says what the rows that are kept say."""

from __future__ import annotations

from benchmarks import results_page
from kvfold.bench.page import written


def test_the_page_is_what_the_kept_runs_give() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert page == written(page, results_page.BEGIN, results_page.END, results_page.body())
