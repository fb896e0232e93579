"""Page sizes: what is counted on a tiny model, what is refused, the table, and the page that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page_sizes
from benchmarks.page_sizes import AXES, Sizes, all_sizes, bytes_row, fill, one_at_a_time, table, time_rows, with_table
from benchmarks.rows import read_rows
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.arena import SUPERBLOCK_BYTES
from kvfold.pages.page_config import PageConfig

NUM_TOKENS = 900


def _rows(model: Model, sizes: list[Sizes]) -> list[dict[str, Any]]:
    runner = Runner(model.hf, model.spec, model.arena)
    return [bytes_row(found) for found in fill(runner, model, NUM_TOKENS, sizes)]


def test_defaults_are_those_of_the_package() -> None:
    assert (Sizes().page_size, Sizes().open_len) == (PageConfig().page_size, PageConfig().open_len)
    assert Sizes().superblock_bytes == SUPERBLOCK_BYTES
    assert all(getattr(Sizes(), axis) in values for axis, values in AXES.items())


def test_one_at_a_time_is_part_of_all() -> None:
    assert set(one_at_a_time()) <= set(all_sizes())
    assert len(all_sizes()) == len(set(all_sizes())) == 4 * 4 * 5
    assert len(one_at_a_time()) == 1 + 3 + 3 + 4


def test_bytes_are_counted_by_hand(model: Model) -> None:
    """bf16 would be 4 bytes here: the tiny model's cache is fp32. 3 layers of 2 heads of 16 dimensions."""
    found, _int4 = _rows(model, [Sizes(open_len=16)])
    assert found["slots"] == -(-NUM_TOKENS // 8) - 16
    assert found["slot_bytes"] == found["slots"] * 6 * (2 * 16 * 4 + 4)
    assert found["overhead"] == found["resident_bytes"] / found["slot_bytes"]
    assert found["open_bytes"] >= 16 * 6 * 2 * 16 * 4
    assert 1 < found["padding"] < found["overhead"]


def test_smaller_sizes_pad_less_and_hold_the_same_slots(model: Model) -> None:
    small, large = Sizes(8, 16, 16 * 1024), Sizes(64, 16, 256 * 1024)
    for policy in page_sizes.POLICIES:
        rows = [row for row in _rows(model, [small, large]) if row["policy"] == policy]
        assert rows[0]["slot_bytes"] == rows[1]["slot_bytes"] and rows[0]["padding"] < rows[1]["padding"]


def test_an_open_block_above_the_size_is_a_note(model: Model) -> None:
    rows = _rows(model, [Sizes(open_len=32), Sizes(open_len=128)])
    assert [row.get("note") for row in rows] == [None, "too small"] * 2


def test_time_rows_hold_every_size(model: Model) -> None:
    runner = Runner(model.hf, model.spec, model.arena)
    found = fill(runner, model, NUM_TOKENS, [Sizes(open_len=16), Sizes(open_len=128)])
    rows = list(time_rows(runner, found, num_steps=20))
    assert [(row["policy"], row["open_len"]) for row in rows] == [(policy, 16) for policy in page_sizes.POLICIES]
    assert all(0 < row["ms_p20"] <= row["ms_p80"] and row["ms"] > 0 for row in rows)
    assert found[0].sequence is not None and found[0].sequence.logical_len == NUM_TOKENS + 22  # two to warm up


def _row(question: str, **more: Any) -> dict[str, Any]:
    sizes = {"page_size": 16, "open_len": 32, "superblock_bytes": SUPERBLOCK_BYTES}
    return {"question": question, "policy": "tova", "tokens": 1000, **sizes, **more}


def test_table_by_hand() -> None:
    rows = [
        _row("bytes", overhead=9.0, padding=9.0),
        _row("bytes", overhead=1.5, padding=1.25),
        _row("decode step", ms=61.04),
        _row("bytes", open_len=128, note="too small"),
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "| size | `tova`, 1,000 |"
    assert "| **page 16** | 1.50 (1.25), 61.0 ms |" in lines  # the latest row of each question
    assert "| open 128 | too small |" in lines and "| superblock 256 KiB | - |" in lines
    assert len(lines) == 2 + 4 + 4 + 5


def test_run_saves_rows_and_the_page_shows_them(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[dict[str, object]] = []
    monkeypatch.setattr(page_sizes, "append_row", lambda name, row: saved.append(row))
    monkeypatch.setattr(page_sizes, "all_sizes", lambda: [Sizes(), Sizes(page_size=64)])
    arguments = ("--model", str(tiny_llama), "--dtype", "float32", "--tokens", str(NUM_TOKENS), "--save")
    page_sizes.main(arguments)
    assert len(saved) == 4 and json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["tokens"] == NUM_TOKENS
    page = with_table(f"{page_sizes.BEGIN}\n{page_sizes.END}", saved)
    assert "| **page 16** |" in page and str(saved[0]["commit"]) in page


def test_docs_page_is_current() -> None:
    page = page_sizes.PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, read_rows(page_sizes.KEPT)), "run `python -m benchmarks.page_sizes --docs`"
