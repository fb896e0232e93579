"""Shards of a run in processes of their own become one run; a process that fails is told, and a limit kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from subprocess import Popen
from threading import Timer
from typing import Any

import pytest

from benchmarks.commands import run_main
from benchmarks.runs import shards
from benchmarks.runs.keep import keep
from kvfold.bench.record import ROWS, read_run
from kvfold.bench.suite import SIZES
from kvfold.cli.main import main
from tests.bench.report_runs import row, write
from tests.bench.runs import rows

OPTIONS = ("--workloads", "passkey", "--modes", "unknown", "--lengths", "300", "--samples", "2", "--fidelity", "0")
MORE = ("--diagnostics", "0", "--policies", "keydiff, knorm", "--memory", "75%", "--device", "cpu", "--arena", "64MB")


def call(out: Path, *arguments: str) -> int:
    return run_main(shards.main, ["--processes", "2", "--out", str(out), *arguments])


@pytest.mark.parametrize("asked", [(), ("--policies", "keydiff + 150tok", "--memory", "own")])
def test_shards_give_the_rows_of_one_process(tiny_llama: Path, tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Also where there are no sizes to be looked for first."""
    bench = ("--model", str(tiny_llama), *OPTIONS, *MORE, *asked)
    assert call(tmp_path / "run", "--", *bench) == 0
    found = read_run(tmp_path / "run")
    assert found.run.shard == "0/1" and "--sizes" not in found.run.command
    assert main(["bench", *bench, "--out", str(tmp_path / "alone")]) == 0
    assert sorted(map(str, rows(tmp_path / "run"))) == sorted(map(str, rows(tmp_path / "alone")))
    joined, alone = tmp_path / "run.parts" / SIZES, tmp_path / "alone" / SIZES
    assert joined.exists() == (not asked)
    if not asked:  # what processes found together, before the first row
        assert sorted(map(str, json.loads(joined.read_text()))) == sorted(map(str, json.loads(alone.read_text())))


def test_a_process_that_fails_ends_all_and_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ("--model", str(tmp_path / "nowhere"), *OPTIONS, *MORE)
    assert call(tmp_path / "run", "--", *bench) == 1
    assert " ended with" in (told := capsys.readouterr().err) and "nowhere" in told
    assert not (tmp_path / "run").exists()


def test_a_limit_leaves_no_process_and_says_how_to_go_on(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ("--model", str(tiny_llama), *OPTIONS, *MORE)
    assert call(tmp_path / "run", "--limit-s", "0", "--", *bench) == shards.OUT_OF_TIME
    assert "the same command goes on from" in capsys.readouterr().err
    assert not (tmp_path / "run" / ROWS).exists()


def test_a_run_that_is_terminated_leaves_no_process(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started, before = shards._started, [], signal.getsignal(signal.SIGTERM)

    def noted(*arguments: Any) -> Popen[bytes]:
        started.append(process := start(*arguments))
        if len(started) == 2:
            Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return process

    monkeypatch.setattr(shards, "_started", noted)
    try:
        assert call(tmp_path / "run", "--", "--model", str(tiny_llama), *OPTIONS, *MORE) == shards.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_run_that_looked_for_no_size_is_kept(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row("full", "100%", 1.0)])
    keep([run], tmp_path / "kept")
    assert read_run(tmp_path / "kept").rows == read_run(run).rows
