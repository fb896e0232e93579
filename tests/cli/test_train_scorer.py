"""`kvfold train-scorer`: the file it writes serves the model it was trained on, and it says how well it predicts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

SMALL = ("--texts", 3, "--length", 150, "--steps", 5, "--hidden", 4)


def test_what_is_trained_can_be_used(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "scorer.safetensors"
    done = call("train-scorer", "--model", folder, "--text", document, *SMALL, "--out", out)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[:5]] == ["layer", "0", "1", "2", "mean"]
    assert "read texts twice\nfit layers\n" in done.err
    question = ("--context", document, "--ask", "why?", "--max-new-tokens", 3)
    used = call("run", "--model", folder, *question, "--policy", f'learned(file="{out}") + global + 2x', "--json")
    assert used.code == 0, used.err
    assert json.loads(used.out)["answers"][0]["policy"] == f'learned(file="{out}") + global + 2x'


def test_json_tells_the_layers(call: Call, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "scorer.safetensors"
    options = ("--texts", 2, "--length", 2000, "--steps", 2, "--hidden", 4)
    done = call("train-scorer", "--model", folder, *options, "--out", out, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["bytes"] == out.stat().st_size and len(found["weights"]) == 64
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]


def test_bad_input_is_one_line(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "scorer.safetensors")
    long = call("train-scorer", "--model", folder, "--text", document, "--length", 5000, *out)
    assert (long.code, long.err.count("\n")) == (2, 1) and "0 pieces of 5000" in long.err
    zero = call("train-scorer", "--model", folder, "--steps", 0, *out)
    assert zero.code == 2 and '"0" is no count' in zero.err
    model = call("run", "--model", folder, "--context", document, "--ask", "why?", "--policy", "learned + 2x")
    assert model.code == 2 and "train one with kvfold train-scorer" in model.err
