"""`kvfold profile`: the file it writes serves the model it was measured on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

SMALL = ("--texts", 2, "--length", 150)
LONG = ("--texts", 1, "--length", 500)


def test_what_is_measured_can_be_used(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.json"
    done = call("profile", "--model", folder, "--text", document, *SMALL, "--out", out)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[:4]] == ["layer", "0", "1", "2"]
    question = ("--context", document, "--ask", "why?", "--max-new-tokens", 3)
    policy = f'keydiff + profile(file="{out}") + 2x'
    used = call("run", "--model", folder, *question, "--policy", policy, "--json")
    assert used.code == 0, used.err


def test_json_tells_the_needs(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.json"
    done = call("profile", "--model", folder, "--text", document, *SMALL, "--out", out, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["needs"] == json.loads(out.read_text(encoding="utf-8"))["needs"]
    by_keys = call("profile", "--model", folder, "--by", "keys", *LONG, "--out", out, "--json")
    assert by_keys.code == 0 and json.loads(by_keys.out)["needs"][0] == [0.0, 0.0]


def test_bad_input_is_one_line(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "heads.json")
    long = call("profile", "--model", folder, "--text", document, "--length", 5000, *out)
    assert (long.code, long.err.count("\n")) == (2, 1) and "0 pieces of 5000" in long.err
    keys = call("profile", "--model", folder, "--by", "keys", "--loss", 0.1, *out)
    assert keys.code == 2 and "leave it out with --by keys" in keys.err
    loss = call("profile", "--model", folder, "--text", document, *SMALL, "--loss", 3, *out)
    assert loss.code == 2 and "the loss is a share of a head's attention" in loss.err
