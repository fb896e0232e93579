"""`kvfold label`: writes a file of labels that train-scorer takes, and goes on after kill -9 and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from kvfold.train.label_format import read_labels
from kvfold.train.label_parts import LabelParts
from tests.cli.conftest import Call, Start

CUT = ("--topk", 3, "--window", 200, "--context", 150)


def test_labels_are_written_and_train_a_scorer(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out, scorer = tmp_path / "labels.safetensors", tmp_path / "scorer.safetensors"
    options = ("--model", folder, "--policy", "streaming + 2x", *CUT, "--out", out)
    done = call("label", document, document, *options, "--json")
    assert done.code == 0, done.err
    found, labels = json.loads(done.out), read_labels(out)
    assert found["labels"] == len(labels.rows.position_N) == len(labels.token_ids_T) - 2
    assert found["compressed"] == int(labels.rows.compressed_N.sum()) == len(labels.token_ids_T) - 300
    assert found["resumed"] == 0 and [path.name for path in tmp_path.iterdir()] == [out.name]
    told = call("label", document, *options)
    assert told.code == 0 and "under streaming + 2x" in told.out
    small = ("--texts", 3, "--length", 150, "--steps", 2, "--hidden", 4)
    used = call("train-scorer", "--model", folder, "--labels", out, *small, "--out", scorer)
    assert used.code == 0 and scorer.exists(), used.err
    both = call("train-scorer", "--model", folder, "--labels", out, "--text", document, "--out", scorer)
    assert both.code == 2 and "brings its own texts" in both.err
    no_weights = call("train-scorer", "--model", folder, "--labels", out, "--teacher", "kvzip", *small, "--out", scorer)
    assert no_weights.code == 2 and "labels change nothing" in no_weights.err


def test_bad_input_is_one_line(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "labels.safetensors")
    for arguments, message in (
        ((document, "--topk", 0), '"0" is no count'),
        ((document, "--policy", "nonsense"), "--policy: "),
        ((document, "--window", 5000), "choose from 2 to 1024"),
        ((tmp_path / "absent.txt",), "cannot be read"),
    ):
        done = call("label", "--model", folder, *arguments, *out)
        assert done.code == 2 and message in done.err and list(tmp_path.iterdir()) == [], done.err
    done = call("label", "--model", folder, document, "--out", document)
    assert done.code == 2 and "is a file that this command reads" in done.err
    done = call("train-scorer", "--model", folder, "--labels", document, *out)
    assert (done.code, done.err.count("\n")) == (2, 1) and "is no file of labels" in done.err
    os.mkfifo(tmp_path / "pipe")
    done = call("train-scorer", "--model", folder, "--labels", tmp_path / "pipe", *out)
    assert (done.code, done.err.count("\n")) == (2, 1) and "cannot be read (it is no file but a" in done.err
    parts = LabelParts(tmp_path / "labels.safetensors.parts", "key")
    done = call("label", "--model", folder, document, *out)
    assert (done.code, done.err.count("\n")) == (2, 1) and "another process writes labels to" in done.err
    parts.remove()
    assert not list(tmp_path.glob("*.parts")) and call("label", "--model", folder, document, *out).code == 0


def test_killed_and_interrupted_runs_go_on(start: Start, call: Call, folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "long.txt", tmp_path / "labels.safetensors"
    text.write_text("".join(chr(97 + number * number % 26) for number in range(2_000)), encoding="utf-8")
    options = ("label", text, "--model", folder, "--policy", "streaming + 2x", *CUT, "--batch", 1, "--out", out)
    parts, seen = tmp_path / "labels.safetensors.parts", 0
    for sent in (signal.SIGKILL, signal.SIGINT):
        process = start(*options)
        while process.poll() is None and len(list(parts.glob("0*"))) < seen + 3:
            time.sleep(0.02)
        process.send_signal(sent)
        err = process.communicate()[1]
        assert process.returncode == (-9 if sent == signal.SIGKILL else 130), err
        seen = len(list(parts.glob("0*")))
        assert seen >= 3 and not out.exists()
    assert "goes on with them" in err
    done = call(*options, "--json")
    found = json.loads(done.out)
    assert found["resumed"] == 149 + 50 * (seen - 1) and found["labels"] > found["resumed"]
    assert not parts.exists() and len(read_labels(out).rows.position_N) == found["labels"]
