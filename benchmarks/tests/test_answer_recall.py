"""Answer recall on a made-up folder: files are read in their kinds, and a plan that finds the answer scores 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.answer_recall import holds, main, measure, plan_of, read_questions
from benchmarks.commands import run_main

CONTEXT = " ".join(
    f"The {name} is in room {at}. Rain fell all day." for at, name in enumerate(("lamp", "bell", "boat", "harp"), 11)
)
ROWS = [
    {"input": f"Where is the {thing}?", "answers": [f"room {number}"], "context": CONTEXT}
    for number, thing in ((12, "bell"), (14, "harp"))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rooms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return tmp_path


def test_answers_are_words_in_a_row() -> None:
    assert holds("It is in Room 12.", ["room 12"]) and not holds("room 120", ["room 12"])


def test_a_selector_that_reads_the_question_keeps_the_answer(folder: Path) -> None:
    questions = read_questions(folder / "rooms.jsonl")
    assert len(questions) == 2
    assert measure(questions, plan_of("rank", "4x", "tfidf"))["recall"] == 1.0
    assert measure(questions, plan_of("head", "8x", "tfidf"))["recall"] == 0.0


def test_the_command_prints_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(main, ["--data", str(folder), "--plans", "rank; head", "--sizes", "4x"])
    assert "rooms" in capsys.readouterr().out
