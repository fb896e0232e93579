"""The page: whole, of one file, true to the rows, and unharmed by what models write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench.record import read_run
from kvfold.bench.report import write_report
from kvfold.cli.main import main
from kvfold.errors import FileError, InputError
from tests.bench.report_runs import EXAMPLE, Elements, row, rows, write

HOSTILE = "</script><script>alert(1)</script><!-- <b>bold</b> &amp; ]]>"


def _page(*runs: Path, folder: Path) -> str:
    out = folder / "report.html"
    write_report(runs, out)
    return out.read_text(encoding="utf-8")


def test_the_example_has_every_part(tmp_path: Path) -> None:
    text = Elements(_page(EXAMPLE, folder=tmp_path)).text
    assert "example answered 6 prompts of 1,000 to 1,002 tokens from 2 workloads" in text
    assert "it scored 100.0 (question known) and 100.0 (question unknown) out of 100." in text
    for heading in ("Quality against memory", "Score by depth and length", "Bytes and speed", "Fidelity"):
        assert heading in text
    assert "kvfold 0.1.0, measured 2026-11-15" in text
    assert "8 answers scored less" in text and "12 rows of 48 have no score" in text
    assert "kvfold bench --suite standard --samples 3" in text and "transformers 5.22.2" in text


def test_contents_lead_to_parts_that_are_there(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare", rows("keydiff", "25%", [None]), model="bare")  # nothing but failures
    elements = Elements(_page(EXAMPLE, bare, folder=tmp_path))
    links = elements.values("a", "href")
    places = {*elements.values("section", "id"), *elements.values("div", "id")}
    assert len(links) > 10 and {link.removeprefix("#") for link in links} <= places


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = _page(EXAMPLE, folder=tmp_path)
    assert not re.search(r"src=|href=\"[^#]|url\(|@import|https?://|\bfetch\(|XMLHttpRequest", page)


def test_bytes_are_those_of_the_rows(tmp_path: Path) -> None:
    """Every size that the table of costs names is one of the rows', and all sizes of rows are named."""
    shown = {float(value) for value in Elements(_page(EXAMPLE, folder=tmp_path)).values("data", "value")}
    ran = [found for found in read_run(EXAMPLE).rows if found.score is not None]
    assert shown == {size for found in ran for size in (found.resident_bytes, found.bytes_per_step)}


def test_bytes_that_differ_are_averaged_by_length(tmp_path: Path) -> None:
    sizes = [(1000, 100), (1000, 201), (2000, 400)]
    listed = [
        row("full", "100%", 1.0, i, length=n, resident_bytes=b, bytes_per_step=7) for i, (n, b) in enumerate(sizes)
    ]
    shown = Elements(_page(write(tmp_path / "run", listed), folder=tmp_path)).values("data", "value")
    assert shown == ["150.50", "7", "400", "7"]


def test_what_models_write_stays_text(tmp_path: Path) -> None:
    harmless = [row("full", "100%", 1.0, answer="fine"), row(HOSTILE, "25%", 0.0, answer=HOSTILE, resolved=HOSTILE)]
    page = _page(write(tmp_path / "run", harmless), folder=tmp_path)
    elements = Elements(page)
    assert [found.get("type") for name, found in elements.tags if name == "script"] == ["application/json", None]
    assert not elements.values("b", "class") and "b" not in {name for name, _ in elements.tags}
    assert elements.text.count(HOSTILE) >= 3  # legend, regression and its answer
    embedded = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert embedded and json.loads(embedded[1])[0]["facts"][-1] == [HOSTILE, HOSTILE]


def test_regressions_name_question_and_both_answers(tmp_path: Path) -> None:
    listed = [row("full", "100%", 1.0, answer="twelve"), row("keydiff", "25%", 0.5, answer="a dozen")]
    text = Elements(_page(write(tmp_path / "run", listed), folder=tmp_path)).text
    for part in ("What is the pass key?", "twelve", "a dozen", "100 → 50", "Context 0 of passkey."):
        assert part in text


def test_little_losses_are_no_regressions(tmp_path: Path) -> None:
    listed = [row("full", "100%", 1.0), row("keydiff", "25%", 0.6)]
    assert "No policy lost half a point" in _page(write(tmp_path / "run", listed), folder=tmp_path)


def test_one_bad_policy_does_not_fill_the_page(tmp_path: Path) -> None:
    full, bad, other = rows("full", "100%", [1.0] * 9), rows("bad", "50%", [0.0] * 9), rows("other", "25%", [0.0] * 9)
    elements = Elements(_page(write(tmp_path / "run", full + bad + other), folder=tmp_path))
    assert sum(name == "article" for name, _ in elements.tags) == 4  # the worst two of each


def test_without_a_full_cache_the_page_says_so(tmp_path: Path) -> None:
    page = _page(write(tmp_path / "run", rows("keydiff", "25%", [1.0, 0.0])), folder=tmp_path)
    assert "The full cache was not run" in page and "NaN" not in page


def test_failed_cells_alone_still_make_a_page(tmp_path: Path) -> None:
    listed = [replace(each, note="out of memory") for each in rows("keydiff", "25%", [None, None])]
    text = Elements(_page(write(tmp_path / "run", listed), folder=tmp_path)).text
    assert "2 rows of 2 have no score" in text and "out of memory" in text


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("the old one")
    with pytest.raises(InputError):
        write_report([tmp_path], out)
    assert out.read_text() == "the old one" and list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"missing.*cannot be written.*choose another place"):
        write_report([EXAMPLE], tmp_path / "missing" / "report.html")


def test_the_command_writes_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(EXAMPLE), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out and out.read_text().startswith("<!doctype html>")


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no run of the benchmark")
