"""The sandbox: what code of a model can do, and what it cannot, in the real interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvfold.errors import InputError, MissingExtra
from kvfold.recurse import sandbox as sandbox_module
from kvfold.recurse.sandbox import Sandbox, SandboxLimits

pytest.importorskip("pydantic_monty", reason="pydantic-monty is not installed")
LIMITS = SandboxLimits(seconds=0.5, memory_bytes=32_000_000, recursion=100, output_chars=2000)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox({"context": "a text of words"}, {"double": lambda text: text * 2}, LIMITS) as found:
        yield found


def test_variables_stay_and_functions_of_the_host_are_called(sandbox: Sandbox) -> None:
    assert sandbox.run("words = context.split()\nprint(len(words))").output == "4\n"
    assert sandbox.run("print(double(words[1]))").output == "texttext\n"
    assert sandbox.value("words") == ["a", "text", "of", "words"]
    assert sandbox.value("nothing") is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('/tmp/x', 'w').write('a')", "PermissionError"),
        ("from pathlib import Path\nPath('/etc/passwd').read_text()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import os\nos.environ['HOME']", "not supported"),
        ("import os\nos.system('true')", "AttributeError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import urllib.request", "ModuleNotFoundError"),
        ("import ctypes", "ModuleNotFoundError"),
        ("import kvfold", "ModuleNotFoundError"),
        ("__import__('os')", "NameError"),
        ("().__class__.__bases__[0].__subclasses__()", "AttributeError"),
        ("double.__globals__", "AttributeError"),
        ("(lambda: 0).__code__", "AttributeError"),
        ("'{0.__class__}'.format(context)", "AttributeError"),
        ("eval('().__class__')", "AttributeError"),
        ("def f(n):\n    return f(n + 1)\nf(0)", "RecursionError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit()", "SystemExit"),
        ("raise KeyboardInterrupt()", "KeyboardInterrupt"),
    ],
)
def test_what_code_may_not_do_is_an_error_that_it_is_told(sandbox: Sandbox, code: str, error: str) -> None:
    ran = sandbox.run(code)
    assert error in ran.error
    assert sandbox.run("print(context)").output == "a text of words\n", "the interpreter lives on"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True:\n    pass", "TimeoutError"),
        ("x = 'a' * 10**9", "MemoryError"),
        ("print('a' * 10**9)", "MemoryError"),
        ("x = [0]\nwhile True:\n    x = x + x", "MemoryError"),
        ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ""),
        ("x = 10 ** 10 ** 10", ""),
        ("import time\ntime.sleep(10**6)", ""),
    ],
)
def test_limits_of_time_and_memory_end_a_run_and_nothing_else(sandbox: Sandbox, code: str, error: str) -> None:
    ran = sandbox.run(f"kept = 1\n{code}")
    assert error in ran.error
    if error in ("TimeoutError", "MemoryError"):
        assert ran.error.endswith("your variables are gone, context is as before.")
        assert sandbox.value("kept") is None
    assert sandbox.run("print(context)").output == "a text of words\n"


def test_output_is_cut_and_endless_output_is_stopped(sandbox: Sandbox) -> None:
    ran = sandbox.run("print('a' * 5000)")
    assert ran.output == "a" * 2000 + "\n… cut: 5,001 characters were printed"
    ran = sandbox.run("x = 'a' * 10**6\nfor i in range(1000):\n    print(x)")
    assert len(ran.output) < 2100
    assert "more than 100,000 characters were printed" in ran.error or "TimeoutError" in ran.error
    ran = sandbox.run("raise ValueError('b' * 10**6)")
    assert len(ran.error) < 2100


def test_an_exception_of_the_host_ends_the_run_even_if_the_code_catches_it() -> None:
    calls: list[str] = []

    def interrupted(text: str) -> str:
        calls.append(text)
        raise KeyboardInterrupt

    code = "for i in range(3):\n    try:\n        ask(str(i))\n    except BaseException:\n        pass"
    with Sandbox({}, {"ask": interrupted}, LIMITS) as sandbox, pytest.raises(KeyboardInterrupt):
        sandbox.run(code)
    assert calls == ["0"]


def test_an_error_of_the_package_is_told_to_the_code() -> None:
    def refuse(text: str) -> str:
        raise InputError("the budget of calls is spent")

    with Sandbox({}, {"ask": refuse}, LIMITS) as sandbox:
        assert "RuntimeError: the budget of calls is spent" in sandbox.run("ask('a')").error
        assert sandbox.run("try:\n    ask('a')\nexcept RuntimeError as error:\n    print(error)").output == (
            "the budget of calls is spent\n"
        )


def test_limits_are_above_zero() -> None:
    with pytest.raises(InputError, match="limit seconds is 0; it is above 0"):
        SandboxLimits(seconds=0)


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "pydantic_monty", None)
    with pytest.raises(MissingExtra, match=r'pip install "kvfold\[code\]"'):
        Sandbox({})


def test_the_worker_is_another_process() -> None:
    with Sandbox({}) as sandbox:
        assert sandbox.run("import sys\nprint(sys.version)").output.strip() != sys.version
