"""docs/shorten.md says what the rows that are kept say."""

from __future__ import annotations

import pytest

from benchmarks import shorten_page
from benchmarks.docs_section import with_section
from kvfold.bench.record import read_run


def test_the_page_is_what_the_kept_runs_give() -> None:
    runs = {name: read_run(shorten_page.KEPT / name) for name in shorten_page.RUNS}
    page = shorten_page.PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, shorten_page.BEGIN, shorten_page.END, shorten_page.body(runs))


def test_a_difference_is_of_shared_samples_and_every_task_counts_the_same() -> None:
    mine = {("a", 0): 1.0, ("a", 1): 1.0, ("b", 0): 0.0, ("b", 1): 1.0}
    theirs = {("a", 0): 0.0, ("b", 0): 0.0, ("b", 1): 0.0, ("b", 2): 1.0}
    found = shorten_page.difference(mine, theirs)
    assert found.num_samples == 3
    assert found.mean == pytest.approx(0.75)  # 1 on a, 0.5 on b
