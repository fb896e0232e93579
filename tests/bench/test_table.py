"""Tables: means and intervals that can be checked by hand, places that are empty, and the page they stand on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvfold.bench.rows import to_json
from kvfold.bench.table import BEGIN, END, caption, interval, results, table, with_sections
from kvfold.errors import InputError
from tests.bench.examples import FACTS, cell

ROOT = Path(__file__).parents[2]


def _lines(text: str) -> list[list[str]]:
    return [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()]


def test_interval_of_a_share_is_that_of_the_binomial() -> None:
    scores = [1.0] * 120 + [0.0] * 280
    low, high = interval([scores])
    exact = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert (low + high) / 2 == pytest.approx(0.3, abs=0.01)
    assert (high - low) / 2 == pytest.approx(exact, rel=0.08)


def test_interval_resamples_within_tasks() -> None:
    """Tasks that differ but do not vary have no uncertainty: they are not drawn, their prompts are."""
    assert interval([[1.0] * 10, [0.0] * 10]) == (0.5, 0.5)


def test_interval_narrows_with_the_root_of_the_prompts() -> None:
    random = np.random.default_rng(1)
    few, many = random.random(50).tolist(), random.random(800).tolist()
    widths = [high - low for low, high in (interval([few]), interval([many]))]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)


def test_tasks_weigh_the_same_however_many_prompts_they_have() -> None:
    cells = [cell("tova", "4x", "known", "single", (1.0,)), cell("tova", "4x", "known", "multikey", (0.0,) * 9)]
    (result,) = results(cells)
    assert result.mean == 50.0 and result.num_prompts == 10


def test_runs_of_two_commits_join() -> None:
    first = cell("tova", "4x", "known", "single", (1.0, 1.0), bytes_ratio=0.2)
    second = cell("tova", "4x", "known", "single", (0.0,) * 6, bytes_ratio=0.4)
    second = replace(second, facts=replace(FACTS, commit="b"))
    (result,) = results([first, second])
    assert result.mean == 25.0 and result.num_prompts == 8
    assert result.bytes_percent == pytest.approx(35)  # (2 * 20 + 6 * 40) / 8
    assert "commit abc1234, b," in caption([first, second])


def test_table_by_hand() -> None:
    cells = [
        cell("full", "", "known", "single", (1.0, 1.0), bytes_ratio=1.04),
        cell("full", "", "unknown", "single", (1.0, 1.0), bytes_ratio=1.06),
        cell("snapkv", "2x", "known", "single", (1.0, 1.0), bytes_ratio=0.5),
        cell("snapkv", "2x", "unknown", "single", (0.0, 0.0), bytes_ratio=0.52),
        cell("snapkv", "8x", "known", "single", (), bytes_ratio=0.0, note="too small"),
        cell("snapkv", "8x", "unknown", "single", (0.0, 0.0), bytes_ratio=0.13),
        cell("tova", "8x", "known", "single", (1.0, 1.0), bytes_ratio=0.14),
    ]
    assert _lines(table(cells)) == [
        ["policy", "known 2x", "known 8x", "unknown 2x", "unknown 8x", "bytes, % of full"],
        ["---"] * 6,
        ["`full`", "100 ±0", "100 ±0", "100 ±0", "100 ±0", "105"],
        ["`snapkv`", "100 ±0", "too small", "0 ±0", "0 ±0", "51 / 13"],
        ["`tova`", "-", "100 ±0", "-", "-", "- / 14"],
    ]


def test_complete_policies_stand_on_their_own() -> None:
    cells = [
        cell("full", "", "known", "single", (1.0,)),
        cell("tova", "8x", "known", "single", (1.0,)),
        cell("tova + int4 + 6.25%mem", "", "known", "single", (0.0,), bytes_ratio=0.06),
    ]
    first, second = table(cells).split("\n\n")
    assert [line[0] for line in _lines(first)[2:]] == ["`full`", "`tova`"]
    assert _lines(second)[0] == ["policy", "known", "bytes, % of full"]
    assert _lines(second)[2] == ["`tova + int4 + 6.25%mem`", "0 ±0", "6"]


def test_full_cache_alone_is_a_table() -> None:
    found = _lines(table([cell("full", "", "known", "single", (1.0, 0.0, 1.0, 0.0))]))
    assert found[0] == ["policy", "known", "bytes, % of full"]
    assert found[2][1].startswith("50 ±") and found[2][2:] == ["25"]


def test_page_is_written_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "needle_tiny.jsonl"
    path.write_text(to_json(cell("full", "", "known", "single", (1.0,))) + "\n")
    page = with_sections(f"before\n{BEGIN}\nold\n{END}\nafter\n", [path])
    assert page.startswith("before\n") and page.endswith(f"{END}\nafter\n") and "old" not in page
    assert "## tiny" in page and "1 prompts of 900 tokens" in page and "| `full` | 100 ±0 |" in page
    assert with_sections(page, [path]) == page


def test_another_haystack_has_a_section_of_its_own(tmp_path: Path) -> None:
    facts = replace(FACTS, haystack="my essays.json 1234abcd")
    essays = replace(cell("full", "", "known", "single", (1.0,)), facts=facts)
    path = tmp_path / "needle_tiny_essays.jsonl"
    path.write_text(to_json(essays) + "\n")
    page = with_sections(f"{BEGIN}\n{END}", [path])
    assert "## tiny, my essays\n" in page and "haystack my essays.json 1234abcd" in page


def test_page_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="markers"):
        with_sections("no markers", [])


def test_empty_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(InputError, match="no results"):
        with_sections(f"{BEGIN}{END}", [tmp_path / "empty"])


def test_docs_page_is_current() -> None:
    page = (ROOT / "docs" / "needle.md").read_text(encoding="utf-8")
    kept = sorted((ROOT / "benchmarks" / "results").glob("needle_*.jsonl"))
    assert page == with_sections(page, kept), "run `python benchmarks/needle.py --docs`"
