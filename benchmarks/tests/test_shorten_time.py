"""`python -m benchmarks.shorten_time` from end to end on a saved tiny model: what is timed is what is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commands import run_main
from benchmarks.shorten_time import main, text_of
from kvfold.errors import InputError
from kvfold.models.loader import Model


def test_the_command_prints_rows(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = "graph, 4x, keep=none; rank, 25%, keep=none; words, 2x, keep=none"
    options = ["--tokens", "600,1000", "--plans", plans, "--embedder", "tfidf", "--repeats", "1", "--device", "cpu"]
    assert run_main(main, ["--model", str(tiny_llama), *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["embedder"] == "tfidf" and found["policy"] == "full"
    assert [(row["tokens"], row["plan"].partition(",")[0]) for row in found["rows"]] == [
        (tokens, selector) for tokens in (600, 1000) for selector in ("graph", "rank", "words")
    ]
    for row in found["rows"]:
        most = row["tokens"] / (2 if "words" in row["plan"] else 4)
        assert 0.5 * most < row["sent_tokens"] <= most
        assert row["speedup"] == pytest.approx(row["plain_s"] / (row["shorten_s"] + row["prefill_s"]), rel=1e-3)


def test_a_text_has_the_length_that_is_asked_for(model: Model, tmp_path: Path) -> None:
    text = text_of(model, 321, None)
    assert len(model.tokenizer(text, add_special_tokens=False)["input_ids"]) == 321
    file = tmp_path / "short.txt"
    file.write_text("too short", encoding="utf-8")
    with pytest.raises(InputError, match=r"short\.txt has \d+ tokens; 321 are asked for"):
        text_of(model, 321, file)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(main, ["--model", "no-such-model"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
