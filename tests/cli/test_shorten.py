"""`kvfold shorten`: prints what stays, shows what goes, and tells what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvfold
from tests import tiny
from tests.cli.conftest import Call

QUESTION = "What is the code of the wine cellar?"


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    path = tmp_path / "handbook.txt"
    path.write_text(kvfold.example_text(), encoding="utf-8")
    return path


def test_it_prints_what_stays(call: Call, handbook: Path) -> None:
    done = call("shorten", handbook, "--to", "25%", "--embedder", "tfidf")
    assert done.code == 0 and done.out == kvfold.shorten(kvfold.example_text(), "25%", embedder="tfidf").text
    assert "words and marks (4.0x)" in done.err.splitlines()[-1]


def test_a_question_chooses_the_selector(call: Call, handbook: Path) -> None:
    done = call("shorten", handbook, "--to", "40tok", "--ask", QUESTION, "--keep", "none")
    assert done.code == 0 and "The code of the wine cellar is 4817." in done.out


def test_tokens_are_the_models(call: Call, handbook: Path, folder: Path) -> None:
    done = call("shorten", handbook, "--to", "50%", "--model", folder, "--json")
    found = json.loads(done.out)
    text = kvfold.example_text()
    assert found["num_original_tokens"] == len(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"])
    assert found["text"] == "".join(text[start:end] for start, end in found["spans"]) and found["is_extractive"]


def test_show_marks_what_goes(call: Call, handbook: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = call("shorten", handbook, "--to", "4x", "--show", "--html", page)
    assert done.out.replace("[-", "").replace("-]", "") == kvfold.example_text()
    html = page.read_text(encoding="utf-8")
    assert html.count("<del>") == done.out.count("[-") > 3


def test_markup_of_the_text_stays_text(call: Call, tmp_path: Path) -> None:
    path, page = tmp_path / "a.txt", tmp_path / "a.html"
    path.write_text("<script>alert(1)</script> is code. [bold]Not bold[/bold]. " * 40, encoding="utf-8")
    done = call("shorten", path, "--to", "2x", "--show", "--html", page)
    assert done.code == 0 and "[bold]Not bold[/bold]" in done.out
    assert "<script>" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--to", "0.5"), "to takes a size like 4x or a share like 50%, not 0.5"),
        (("--to", "4MB"), "to is 4x, 25% or 2000tok"),
        (("--to", "0%"), "above 0% and at most 100%"),
        (("--to", "4x", "--by", "snapkv"), 'no selector "snapkv"'),
        (("--to", "4x", "--by", "rank"), "give one with --ask"),
        (("--to", "4x", "--keep", "cats"), '"cats" is nothing that can be kept'),
        (("--to", "4x", "--units", "pages"), 'no units of a text "pages"'),
        (("--to", "4x", "--embedder", "word2vec"), 'no embedder "word2vec"'),
        (("--to", "8x", "--keep", "all"), "keep less"),
        (("--to", "4x) + int4 + keep(", "--by", "graph"), "error:"),
        (("--to", "4x", "--html", "no/such/folder/a.html"), "does not exist"),
    ],
)
def test_what_cannot_be_is_one_line(call: Call, handbook: Path, arguments: tuple[str, ...], told: str) -> None:
    done = call("shorten", handbook, *arguments)
    assert done.code == 2 and told in done.err and not done.out
    assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1


def test_run_tells_what_shortening_did(call: Call, folder: Path, handbook: Path) -> None:
    asked = ("--context", handbook, "--ask", QUESTION, "--max-new-tokens", 2, "--model", folder)
    done = call("run", *asked, "--policy", "shorten(rank, 8x) + int4")
    assert done.code == 0 and "text shortened from" in done.out
    found = json.loads(call("run", *asked, "--policy", "shorten(rank, 8x)", "--json").out)["answers"][0]
    assert found["num_original_tokens"] > 7 * found["num_tokens"]
