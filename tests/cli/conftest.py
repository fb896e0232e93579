"""A near-zero-size model in a folder, and `kvfold` driven in this process and in one of its own."""

from __future__ import annotations

import os
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
