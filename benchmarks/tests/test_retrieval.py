"""`python -m benchmarks.retrieval` on small files of both kinds: which units bear answers, shares, table, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import retrieval
from benchmarks.commands import run_main
from benchmarks.retrieval import Question, bears_answer, counts, read

FIRST = "The river Aller flows north. It is 211 km long. A ferry crosses it near Celle."
SECOND = "The moon has no air. Its dust is sharp."


def squad(file: Path) -> Path:
    asked = {"question": "How long is the river?", "answers": [{"answer_start": FIRST.index("211"), "text": "211 km"}]}
    paragraphs: list[dict[str, Any]] = [{"context": SECOND, "qas": []}, {"context": FIRST, "qas": [asked]}]
    file.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    return file


def with_contexts(file: Path) -> Path:
    contexts = [{"title": "", "text": text} for text in (FIRST, SECOND)]
    samples = [
        {"question": "What crosses the Aller?", "answers": ["A FERRY", "bridge"], "ctxs": contexts},
        {"question": "Who?", "answers": ["nobody"], "ctxs": contexts},
    ]
    file.write_text(json.dumps(samples))
    return file


def test_units_that_bear_answers(tmp_path: Path) -> None:
    (document,) = read(squad(tmp_path / "squad.json"), True)
    (question,) = document.questions
    assert [document.units[number].strip() for number in question.answers] == ["It is 211 km long."]
    (document,) = read(squad(tmp_path / "squad.json"), False)
    assert document.questions[0].answers == {1}
    found, missing = read(with_contexts(tmp_path / "list.json"), True)
    assert [found.units[number].strip() for number in found.questions[0].answers] == ["A ferry crosses it near Celle."]
    assert not missing.questions[0].answers


def test_the_first_quarter_is_rounded_up_and_ties_go_to_the_earlier() -> None:
    score = np.array([0.0, 2.0, 2.0, 0.0, 1.0])
    asked = [Question("", frozenset({number})) for number in range(5)]
    assert [bears_answer(score, 25, question) for question in asked] == [False, True, True, False, False]
    assert [bears_answer(score, 80, question) for question in asked] == [True, True, True, False, True]


def test_counts_of_what_one_finds_alone() -> None:
    row = counts([(True, False, True), (False, True, False), (False, True, True), (True, True, True)])
    assert row == {"questions": 4, "cosine": 0.5, "bm25": 0.75, "fused": 0.75, "gained": 1, "lost": 1}


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(squad(tmp_path / "squad.json")), str(with_contexts(tmp_path / "list.json"))]
    retrieval.main([*files, "--embedders", "tfidf", "--top", "25", "100"])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)
    assert [(row["data"], row["units"], row["top"]) for row in rows] == [
        (data, units, top) for data in ("squad", "list") for units in ("sentences", "paragraphs") for top in (25, 100)
    ]
    assert all(row["fused"] == row["bm25"] == row["cosine"] == 1 for row in rows if row["top"] == 100)
    assert len(lines) == 2 + len(rows)


def test_another_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert run_main(retrieval.main, [str(tmp_path / "other.json")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
