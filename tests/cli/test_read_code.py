"""`kvfold read --verify` and `--code`: what they print, and options that would have no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.recurse.texts import QUESTION, document, save

pytest.importorskip("pydantic_monty", reason="pydantic-monty is not installed")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("long"))


@pytest.fixture
def read(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_folder: Path) -> Call:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    notes = tmp_path / "notes.txt"
    notes.write_text(document(), encoding="utf-8")
    model = ("--model", long_folder, "--device", "cpu", "--memory", "64MB", "--max-new-tokens", 4)
    return lambda *words: call("read", notes, "--ask", QUESTION, *model, *words)


def test_verify_tells_what_checks_refused(read: Call) -> None:
    done = read("--verify", "--chunk", 200)
    assert done.code == 0
    assert "replies refused by checks" in done.err and "retries" in done.err
    found = json.loads(read("--verify", "--chunk", 200, "--json").out)
    assert found["checks"]["refused"] > 0
    assert json.loads(read("--chunk", 200, "--json").out)["checks"] is None


def test_code_gives_the_best_answer_so_far_with_its_turns(read: Call) -> None:
    done = read("--code", "--max-turns", 1)
    assert done.code == 0 and done.out == "nothing found\n"
    assert "the best answer so far: the budget of turns is spent\n1 turn, 1 with errors, 1 call" in done.err
    found = json.loads(read("--code", "--budget-tokens", 100, "--json").out)
    assert (found["stopped_by"], found["turns"], found["is_complete"]) == ("tokens", [], False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--code", "--tree"), "--tree is for the tree of parts, which --code does not build"),
        (("--code", "--measure", "2"), "--measure is for the tree of parts"),
        (("--code", "--speculate"), "--speculate is for the tree of parts"),
        (("--code", "--verify"), "--verify is for the tree of parts"),
        (("--code", "--chunk", "100"), "--chunk is for the tree of parts"),
        (("--max-turns", "3"), "--max-turns counts replies with code; add --code, or leave it out"),
    ],
)
def test_options_without_effect_are_refused(read: Call, words: tuple[str, ...], told: str) -> None:
    done = read(*words)
    assert done.code == 2 and told in done.err
