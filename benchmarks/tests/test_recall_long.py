"""`python -m benchmarks.recall_long` from end to end on a saved tiny model: rows, table, page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recall_long
from benchmarks.commands import run_main


def test_rows_table_page(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "recall.jsonl", tmp_path / "recall.md"
    monkeypatch.setattr(recall_long, "KEPT", kept)
    monkeypatch.setattr(recall_long, "PAGE", page)
    run = ["--model", str(tiny_llama), "--device", "cpu", "--memory", "64MB", "--length", "900"]
    more = ["--samples", "1", "--slots", "320", "--recall", "recall(tokens=32)", "--full", "--out", str(kept)]
    recall_long.main([*run, *more])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    recalling, same, full = rows
    assert recalling["policy"] == "streaming + 320tok + keep + recall(tokens=32)"
    assert recalling["host_bytes"] > 0 == same["host_bytes"]
    assert same["device_bytes"] <= recalling["device_bytes"] < full["device_bytes"]
    page.write_text(f"before\n{recall_long.BEGIN}\nold\n{recall_long.END}\n")
    recall_long.main(["--docs"])
    text = page.read_text()
    assert "old" not in text
    assert text.count("| 900 |") == 3
    assert f"{recalling['hits']} of 1" in text


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(recall_long.main, ["--model", "no-such-model"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
