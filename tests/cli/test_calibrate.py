"""`kvfold calibrate`: the file it writes serves the model it was measured on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

SMALL = ("--texts", 2, "--length", 150)


def test_what_is_measured_can_be_used(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "bases.safetensors"
    done = call("calibrate", "--model", folder, "--text", document, *SMALL, "--out", out)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[:4]] == ["layer", "0", "1", "2"]
    question = ("--context", document, "--ask", "why?", "--max-new-tokens", 3)
    used = call("run", "--model", folder, *question, "--policy", f'palu("{out}", int8)', "--json")
    assert used.code == 0, used.err


def test_single_heads_serve_policies_that_evict(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "single.safetensors"
    done = call("calibrate", "--model", folder, "--text", document, *SMALL, "--heads", 1, "--out", out, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["heads"] == 1 and told["bytes"] == out.stat().st_size
    assert sum(layer["k"] + layer["v"] for layer in told["layers"]) == round(0.7 * 24) * 4
    question = ("--context", document, "--ask", "why?", "--max-new-tokens", 3)
    used = call("run", "--model", folder, *question, "--policy", f'keydiff + 2x + palu("{out}")', "--json")
    assert used.code == 0, used.err


def test_bad_input_is_one_line(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "bases.safetensors")
    long = call("calibrate", "--model", folder, "--text", document, "--length", 5000, *out)
    assert (long.code, long.err.count("\n")) == (2, 1) and "0 pieces of 5000" in long.err
    lost = call("calibrate", "--model", folder, "--text", document, *SMALL, "--out", tmp_path / "no" / "where")
    assert lost.code == 2 and "does not exist" in lost.err
