"""`--speculate`: the same answers, with what drafts came to in the JSON; bad numbers are told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call


def _answer(call: Call, *arguments: object) -> dict[str, Any]:
    done = call("run", "--ask", "what of the sea?", "--json", "--max-new-tokens", 24, *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["answers"][0]
    return found


def test_answers_are_the_same(call: Call, folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("all pairs " + " ".join(chr(a) + chr(b) for a in range(97, 123) for b in range(65, 91)))
    plain = _answer(call, "--model", folder, "--context", document)
    assert (plain["drafted"], plain["accepted"], plain["tokens_per_pass"]) == (0, 0, 1)
    for option in (("--speculate",), ("--speculate", 2)):
        fast = _answer(call, "--model", folder, "--context", document, *option)
        assert fast["answer"] == plain["answer"] and fast["num_new_tokens"] == plain["num_new_tokens"]
        assert fast["drafted"] > 0
        passes = 23 - fast["accepted"]
        assert fast["tokens_per_pass"] == pytest.approx(1 + fast["accepted"] / passes)


@pytest.mark.parametrize("value", [0, -3])
def test_a_bad_number_is_told(call: Call, folder: Path, document: Path, value: int) -> None:
    arguments = ("--model", folder, "--context", document, "--ask", "what?", f"--speculate={value}")
    done = call("run", *arguments)
    assert done.code == 2 and f'"{value}" is no count; write a whole number from 1 on' in done.err


def test_help_says_when_it_pays(call: Call) -> None:
    for command in ("run", "chat"):
        text = " ".join(call(command, "--help").out.split())
        assert "--speculate [N]" in text and "off unless given: it pays where answers repeat the text" in text
