"""docs/read.md says what the rows that are kept say, and where recursion begins to pay follows from them."""

from __future__ import annotations

import pytest

from benchmarks import recurse_page as page
from benchmarks.docs_section import with_section
from benchmarks.rows import Row

ABOUT: Row = {
    **{"model": "tiny", "device": "x86_64 CPU, 8 threads", "window": 8192, "chunk": 2000, "memory": "4GB"},
    **{"commit": "abc1234", "date": "2026-11-18", "started": "2026-11-18T06:00:00+00:00"},
}
COST: Row = {"calls": 1, "seconds": 2.0, "arena_mb": 100.0, "memory_mb": 900.0, "ratio": 1.0, "dropped": 0}


def _rows(kind: str, tokens: int, right: str, policy: str = "full", **more: object) -> list[Row]:
    """A row for each question; y is a right answer."""
    own = {"arm": kind, "policy": policy, "tokens": tokens, **COST, **ABOUT, **more}
    return [{**own, "sample": sample, "right": letter == "y"} for sample, letter in enumerate(right)]


ROWS = [
    *({"arm": "sharing", "part": 400, "calls": 32, "shared_s": 1.5, "sequential_s": 4.5, "factor": 3.0} | ABOUT,),
    *_rows("truncated", 16_000, "yyyy"),
    *_rows("recursive", 16_000, "yyyn"),
    *_rows("truncated", 64_000, "nnynnnyn"),
    *_rows("recursive", 64_000, "yyynyyyn", seconds=120.0),
    *_rows("recursive", 64_000, "yn", "snapkv + 4x", ratio=3.96),
    *_rows("truncated", 200_000, "nnnnnnnn"),
    *_rows("recursive", 200_000, "yynnyyyy"),
]


def test_the_page_is_what_the_kept_rows_give() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == with_section(text, page.BEGIN, page.END, page.body(page.kept()))


def test_a_line_has_share_interval_means_and_peaks() -> None:
    lines = page.summary(ROWS).splitlines()
    assert "| 16,000 | one truncated pass | 4 of 4 (51-100 %) | 1 | 2.0 | 100 MB | 900 MB | 1.0x |" in lines
    assert "| 64,000 | by parts, `full` | 6 of 8 (41-93 %) | 1 | 120 | 100 MB | 900 MB | 1.0x |" in lines
    assert "| 64,000 | by parts, `snapkv + 4x` | 1 of 2 (9-91 %) | 1 | 2.0 | 100 MB | 900 MB | 4.0x |" in lines
    assert lines[-1] == (
        "32 calls with parts of 400 tokens took 1.50 s as forks in batches and 4.50 s one by one with nothing shared "
        "(3.0x)."
    )


def test_recursion_pays_from_the_length_on_from_which_it_is_always_better() -> None:
    found = page.crossover(ROWS)
    assert found is not None and found[0] == 64_000 and found[1].num_samples == 16
    told = page.crossover_told(ROWS)
    assert told.startswith("From 64,000 tokens on, recursion is right more often than one truncated pass: +6")
    assert "64,000: +50 [+12, +88], n 8" in told
    few = [row for row in ROWS if row.get("sample", 0) < 3]
    assert page.gain(few, 64_000) is not None and page.crossover(few[:-1]) is not None, "lengths count together"
    alike = [*_rows("truncated", 64_000, "nn"), *_rows("recursive", 64_000, "yy")]
    assert page.crossover(alike) is None, "two questions do not settle it"
    lost = [*ROWS, *_rows("truncated", 300_000, "y"), *_rows("recursive", 300_000, "n")]
    assert page.crossover(lost) is None
    assert page.crossover_told(lost).startswith("No length is shown from which on recursion is right")


def test_questions_of_one_arm_alone_do_not_count() -> None:
    more = [*_rows("truncated", 64_000, "n"), *_rows("recursive", 64_000, "nyyy")]
    found = page.gain(more, 64_000)
    assert found is not None and (found.mean, found.num_samples) == (0, 1)
    assert page.gain(_rows("recursive", 64_000, "y"), 64_000) is None


def test_the_last_run_of_each_model_counts_and_what_did_not_run_has_no_line() -> None:
    again = _rows("recursive", 16_000, "nn", started="2026-11-19T06:00:00+00:00")
    other = _rows("recursive", 16_000, "y", model="other")
    unrun = [{"arm": "recursive", "policy": "full", "tokens": 900_000, "sample": 0, "predicted_s": 9.0, **ABOUT}]
    failed = [{"arm": "truncated", "policy": "full", "tokens": 900_000, "sample": 0, "error": "x", **ABOUT}]
    text = page.body([*ROWS, *other, *unrun, *failed, *again])
    assert text.count("| 16,000 |") == 2 and "0 of 2" in text and "200,000" not in text
    assert page.body([*unrun, *failed]) == page.body([]) == ""
    assert "900,000" not in page.body([*ROWS, *unrun, *failed])
    assert "tiny (window 8,192), x86_64 CPU, 8 threads, parts of 2,000 tokens, plain prompts, 4GB for KV" in text
    assert "for KV caches, commit abc1234" in text


@pytest.mark.parametrize(
    ("right", "count", "expected"), [(0, 4, (0.0, 0.490)), (4, 4, (0.510, 1.0)), (5, 10, (0.237, 0.763))]
)
def test_an_interval_is_wilsons(right: int, count: int, expected: tuple[float, float]) -> None:
    assert page.wilson(right, count) == pytest.approx(expected, abs=1e-3)
