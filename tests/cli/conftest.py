"""A near-zero-size model in a folder, and `kvfold` driven in this process and in one of its own."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvfold.cli.main import main
from tests import tiny

Start = Callable[..., "subprocess.Popen[str]"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


class Terminal(io.StringIO):
    """Somebody types, or watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers, which never ends by itself, as a checkpoint folder."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.build("llama").save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 600 tokens of text."""
    path = tmp_path_factory.mktemp("text") / "document.txt"
    path.write_text(" ".join(f"line {number} tells of the sea." for number in range(24)), encoding="utf-8")
    return path


def without_progress(err: str) -> str:
    """What a process said on stderr beside lines of progress, which a busy machine makes it print."""
    return re.sub(r"^(load|prefill|answer|fetch)\b.* s\n", "", err, flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than users see it; no line of progress comes between."""
    monkeypatch.setattr("kvfold.models.pull.progress.LINE_EVERY_S", 600.0)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in this process."""

    def run(*arguments: object) -> Done:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `python -m kvfold` with pipes; Ctrl-C works even where this process was told to ignore it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfold", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},  # empty: buffered, as for users
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
        started.append(process)
        return process

    yield run
    for process in started:  # none outlives its test, however that ended
        process.kill()
        process.wait()
