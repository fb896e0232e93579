"""Commands of benchmarks: those that pages name exist, all of them are found, and mistakes are one line."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from benchmarks.commands import run_command, run_main
from benchmarks.rows import ROOT
from kvfold.errors import InputError

FOLDERS = ("error", "gpu", "runs", "server", "store")
NAMED = re.compile(r"python -m benchmarks\.(\w+)(?: (\w+))?")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_pages_name_commands_that_exist() -> None:
    named = {found for page in PAGES for found in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) >= 20
    for name, command in named:
        assert find_spec(f"benchmarks.{name}"), name
        assert name not in FOLDERS or command in ("", *import_module(f"benchmarks.{name}").COMMANDS), (name, command)


def test_benchmarks_name_pages_that_exist() -> None:
    files = [ROOT / "benchmarks" / "README.md", *(ROOT / "benchmarks").rglob("*.py")]
    named = {found for file in files for found in re.findall(r"docs/[\w/]+\.md", file.read_text("utf-8"))}
    assert len(named) >= 10
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_help_tells_what_every_command_asks(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"benchmarks.{folder}", ["--help"]) == 0
    shown = capsys.readouterr().out
    modules = {path.stem for path in (ROOT / "benchmarks" / folder).glob("*.py") if "\ndef main(" in path.read_text()}
    assert modules == set(import_module(f"benchmarks.{folder}").COMMANDS)
    for name in modules:
        module = import_module(f"benchmarks.{folder}.{name}")
        assert str(module.__doc__).splitlines()[0] in shown
        assert f"    python -m benchmarks.{folder} {name}" in str(module.__doc__)
        with pytest.raises(SystemExit, match="0"):
            module.main(["--help"])
        assert f"usage: python -m benchmarks.{folder} {name} [-h]" in capsys.readouterr().out


def test_the_package_runs_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.runs", "pairs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: no command "pairs"; commands: shards, keep, paired, own_sizes, page\n'
    assert run_command("benchmarks.runs", []) == 2
    assert "usage: python -m benchmarks.runs COMMAND" in capsys.readouterr().out


def test_an_error_of_the_package_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: object) -> None:
        raise InputError(f"{arguments} are no arguments")

    assert run_main(main, ["a"]) == 1
    assert capsys.readouterr().err == "error: ['a'] are no arguments\n"
