"""`kvfold bench` from end to end on a saved tiny model: table and report, list, refusals, and going on after a kill."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvfold.bench.record import ROWS, read_run
from tests.bench.runs import rows
from tests.cli.conftest import Call, Start

CHOICES = ("--workloads", "passkey,kv", "--lengths", "700", "--samples", "2", "--modes", "known", "--device", "cpu")
POLICIES = ("--policies", "keydiff, int4", "--memory", "100%,75%", "--fidelity", "1", "--diagnostics", "0")


def _arguments(folder: Path, out: Path) -> tuple[str, ...]:
    return ("bench", "--model", str(folder), *CHOICES, *POLICIES, "--arena", "64MB", "--out", str(out))


def _wait_for_rows(process: subprocess.Popen[str], path: Path) -> None:
    while not (path.exists() and b"\n" in path.read_bytes()):
        assert process.poll() is None, f"ended before it wrote a row: {process.communicate()}"
        time.sleep(0.02)


def test_table_report_and_going_on_after_a_kill(folder: Path, tmp_path: Path, call: Call, start: Start) -> None:
    done = call(*_arguments(folder, tmp_path / "whole"))
    assert done.code == 0, done.err
    assert "passkey:passkey, 700 tokens, question known" in done.out and "keydiff" in done.out
    assert "<html" in (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    whole = rows(tmp_path / "whole")
    assert len(whole) == 2 * 2 * (1 + 1 + 2)

    killed = start(*_arguments(folder, tmp_path / "killed"))
    _wait_for_rows(killed, tmp_path / "killed" / ROWS)
    killed.kill()
    killed.wait()
    assert len(read_run(tmp_path / "killed").rows) < len(whole)
    assert call(*_arguments(folder, tmp_path / "killed")).code == 0
    assert rows(tmp_path / "killed") == whole


def test_ctrl_c_leaves_a_run_and_says_how_to_go_on(folder: Path, tmp_path: Path, start: Start) -> None:
    process = start(*_arguments(folder, tmp_path / "run"), "--seed", "1")
    _wait_for_rows(process, tmp_path / "run" / ROWS)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert f"--out {tmp_path / 'run'} --seed 1 resumes from" in told and "Traceback" not in told


def test_list_names_every_workload_and_what_lacks_a_file(call: Call) -> None:
    done = call("bench", "--list")
    assert done.code == 0
    for name in ("needle", "ruler", "longbench", "chat", "stream", "(qa_1)", "RULER, arXiv:2404.06654"):
        assert name in done.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policies", "keydiff + 8x"), "has a size of its own"),
        (("--memory", "none"), 'memory "none" is no share'),
        (("--lengths", "long"), '"long" is no length'),
        (("--workloads", "nothing"), 'no workload "nothing"'),
        (("--data", "rag"), "is no option of a workload"),
        (("--samples", "-1"), "is no count"),
        (("--shard", "4/4"), "shard 4/4 does not exist"),
        (("--find-sizes", "2/2"), "shard 2/2 does not exist"),
        (("--shard", "0/2", "--find-sizes", "0/2"), "not allowed with argument --shard"),
    ],
)
def test_bad_options_are_told_before_a_model_is_looked_for(call: Call, arguments: tuple[str, ...], told: str) -> None:
    done = call("bench", "--model", "no-such-model", *arguments)
    assert done.code == 2 and told in done.err and "no-such-model" not in done.err
