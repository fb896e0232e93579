"""`kvfold shorten`: prints what stays, shows what goes, and tells what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.shorten import _steps
from kvfold.errors import InputError
from kvfold.text_io import decode_text
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
        (("--to", "4x", "--html", "a\0b"), "NUL character"),
        (("--to=-1x",), "size -1x"),
        (("--to", "4x", "--units", "fixed", "--keep", "none"), "no unit of the text fits"),
        (("--to", "2x, keep=none"), 'expected one value, found ","'),
        (("--to", "4x", "--by", "graph", "--ask", QUESTION), "--by graph reads no question"),
        (("--to", "4x", "--rope", "yarn:4"), "--rope makes the window of a model longer"),
    ],
)
def test_what_cannot_be_is_one_line(call: Call, handbook: Path, arguments: tuple[str, ...], told: str) -> None:
    done = call("shorten", handbook, *arguments)
    assert done.code == 2 and told in done.err and not done.out
    assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1


def test_a_value_that_looks_like_an_option_is_told(call: Call, handbook: Path) -> None:
    done = call("shorten", handbook, "--to", "-1x")
    assert done.code == 2 and "a value that begins with - is written --to=-…" in done.err


def test_a_page_replaces_neither_the_text_nor_a_pipe(call: Call, handbook: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for page, told in ((handbook, "is a file that this command reads"), (pipe, "is a device or a pipe")):
        done = call("shorten", handbook, "--to", "4x", "--html", page)
        assert done.code == 2 and told in done.err
    assert handbook.read_text(encoding="utf-8") == kvfold.example_text() and pipe.is_fifo()


def test_a_name_with_nul_is_told(call: Call) -> None:
    done = call("shorten", "a\0b", "--to", "4x")
    assert done.code == 2 and "cannot be read" in done.err


def test_progress_is_in_percent() -> None:
    steps: list[int] = []
    report = _steps(steps.append)
    for count in (1, 2, 3):
        report(count, 3)
    assert steps == [33, 33, 34]


def test_stdin_of_another_encoding_is_told_the_way_out() -> None:
    with pytest.raises(InputError, match=r"stdin is UTF-16; pipe it through iconv -f UTF-16 -t UTF-8$"):
        decode_text("text".encode("utf-16"), "stdin")


def test_run_tells_what_shortening_did(call: Call, folder: Path, handbook: Path) -> None:
    asked = ("--context", handbook, "--ask", QUESTION, "--max-new-tokens", 2, "--model", folder)
    done = call("run", *asked, "--policy", "shorten(rank, 8x) + int4")
    assert done.code == 0 and "text shortened from" in done.out
    found = json.loads(call("run", *asked, "--policy", "shorten(rank, 8x)", "--json").out)["answers"][0]
    assert found["num_original_tokens"] > 7 * found["num_tokens"]
