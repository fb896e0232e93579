"""Pages say what the rows that are kept say; of rows about the same the last one counts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from benchmarks import handover_page, memory_page, verify_page
from benchmarks.rows import newest

FACTS = {"device": "aarch64 CPU", "threads": 2, "commit": "abc1234", "date": "2026-11-18", "model": "m"}
SUM = {"policy": "full", "chains": 2, "numbers": 5, "largest": 9, "lines": 8, "chains_right": 0.5, "generated": 1200}
LONG: dict[str, Any] = {"arm": "long", "tokens": 64_100, "steps": 64, "bound_bytes": 230_000_000, "lines_right": 0.75}


@pytest.mark.parametrize("page", [verify_page, memory_page, handover_page])
def test_a_page_is_what_the_kept_rows_give(page: ModuleType) -> None:
    assert page.SECTION.page.read_text(encoding="utf-8") == page.SECTION.rewritten()


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("full", "everything, full cache"),
        ("shorten(head, 512tok, keep=none)", "the first 512 tokens as text"),
        ("shorten(tail, 8192tok)", "the last 8,192 tokens as text"),
        ("shorten(graph, 512tok)", "everything, `shorten(graph, 512tok)`"),
        ("kvzip + 4x", "everything, `kvzip + 4x`"),
    ],
)
def test_what_is_handed_over_is_told(policy: str, told: str) -> None:
    assert handover_page.handed(policy) == told


def test_the_last_of_rows_about_the_same_counts() -> None:
    rows = [{"a": 1, "n": 1}, {"a": 2, "n": 2}, {"a": 1, "n": 3}]
    assert newest(rows, "a") == [{"a": 1, "n": 3}, {"a": 2, "n": 2}]


def test_sums_stand_by_check_and_long_chains_beside_the_full_cache() -> None:
    costs = {"retries": 3, "failed": 1, "wasted": 0.25}
    sums = [
        {"arm": arm, "lines_right": right, **SUM, **costs, **FACTS} for arm, right in (("none", 0.5), ("reason", 1))
    ]
    sizes = {"keydiff + slot + 4000tok + int8": 115_000_000, "full": 1_840_000_000}
    long = [
        {**LONG, "policy": policy, "peak_bytes": size, "held_bytes": size, "seconds": 40.2, **costs, **FACTS}
        for policy, size in sizes.items()
    ]
    found = verify_page.body([*long, *sums])
    assert (
        "Running sums of 5 numbers up to 9, 2 chains; m, policy `full`, aarch64 CPU, 2 threads, commit abc1234" in found
    )
    assert "| no check | 50% of 8 | 50% | 3 | 1 | 1,200 | 25% |" in found
    assert "One chain of 64,100 tokens, bound 230.0 MB; m" in found
    assert "| `keydiff + slot + 4000tok + int8` | 115.0 MB | 50% | 115.0 MB | 75% of 64 | 3 | 25% | 40 s |" in found
    assert "| `full` | 1,840.0 MB | 800% |" in found


def test_a_model_has_a_table_of_its_own_without_rows_of_few_questions() -> None:
    kinds = {"current": 1.0, "updated": 0.5, "past": 0.25, "ended": None, "unknown": 0.0}
    about = {"wording": "plain", "logs": 10, "embedder": "potion", "tokens": 4_516.4, "ms": 12.34, "recalled": 1.0}
    many = {"system": "full", "policy": "kvzip + 4x", "questions": 250, "accuracy": 0.5, **kinds, **about, **FACTS}
    found = memory_page.body([many, {**many, "system": "bm25", "questions": 10}])
    assert "Answered by m, 10 logs, 250 questions; " in found and "BM25" not in found
    assert "| the whole log | `kvzip + 4x` | 50.0 | 100.0 | 50.0 | 25.0 | - | 0.0 | 100.0 | 4,516 | 12.3 |" in found
