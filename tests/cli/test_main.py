"""The command itself, in a process of its own: help, version, exit codes, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.main import COMMANDS, build_parser, main
from tests.cli.conftest import Call, Start, without_progress

NAMES = [command.__name__.rpartition(".")[2].replace("_", "-") for command in COMMANDS]


def test_version_and_help(start: Start) -> None:
    assert start("--version").communicate()[0] == f"kvfold {kvfold.__version__}\n"


def test_help_names_every_command_and_gives_examples(call: Call) -> None:
    done = call("--help")
    assert done.code == 0
    for name in NAMES:
        assert re.search(rf"\n    {name}\s", done.out)
    assert "\nexamples:\n" in done.out


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(call: Call, name: str) -> None:
    done = call(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert "usage: kvfold" in done.out


def test_options_have_help() -> None:
    """An option without an explanation is of no use to a newcomer."""
    (subparsers,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    parsers = subparsers.choices
    assert isinstance(parsers, dict)
    missing = [
        (name, action.dest) for name, parser in parsers.items() for action in parser._actions
        if not action.help and action.nargs != "A..."
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("arguments", [("fly",), ("run",), ("run", "--context", "x", "--ask", "y", "--dtype", "int3")])
def test_a_bad_command_line_exits_with_2(call: Call, arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "kvfold" in done.err


def test_ctrl_c_is_one_line_and_130(start: Start, folder: Path, document: Path) -> None:
    process = start("run", "--model", folder, "--context", document, "--ask", "x", "--max-new-tokens", 10**6)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("question unknown")  # printed when the work starts
    assert (process.stdout.readline(), process.stdout.readline()) == ("1. x\n", "\n")
    assert process.stdout.read(3) == "1. "  # the answer comes while it is generated
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, without_progress(err)) == (130, "interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_while_a_model_is_loaded(start: Start, folder: Path, document: Path) -> None:
    process = start("run", "--model", folder, "--context", document, "--ask", "x", "--max-new-tokens", 10**6)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, without_progress(err)) == (130, "", "interrupted\n")


def test_ctrl_c_in_a_download(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index takes the connection and says nothing."""
    for variable in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(120)
        monkeypatch.setenv("KVFOLD_HOME", str(tmp_path))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        process = start("models", "pull", "smollm2-135m")
        with index.accept()[0]:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.splitlines()[-1]) == (130, "", "interrupted") and "Traceback" not in err
    assert not (tmp_path / "models" / "smollm2-135m").exists()


@pytest.mark.parametrize("arguments", [("policies",), ("policies", "--json"), ("policies", "int4", "--json")])
def test_a_closed_pipe_is_quiet(start: Start, arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    os.close(process.stdout.fileno())
    err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (1, "")


def test_a_warning_is_told_once_in_one_line(call: Call, folder: Path, tmp_path: Path) -> None:
    """The tiny model was made for 1024 positions; both policies and both questions pass them."""
    long = tmp_path / "long.txt"
    long.write_text("x" * 1100, encoding="utf-8")
    asked = ("--ask", "one", "--ask", "two", "--max-new-tokens", 2)
    done = call("run", "--model", folder, "--context", long, *asked, "--compare", "int4")
    assert done.code == 0
    assert [line for line in done.err.splitlines() if "1024" in line] == done.err.splitlines()
    assert done.err.count("\n") == 1 and done.err.startswith("warning: the sequence passes 1024 positions")


def test_the_command_alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: kvfold" in capsys.readouterr().out


def test_env_tells_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kvfold"] == kvfold.__version__ and found["torch"].startswith("2.") and "cores" in found["cpu"]
    assert main(["env"]) == 0
    assert capsys.readouterr().out.startswith("kvfold        ")
