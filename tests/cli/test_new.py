"""`kvfold new`: what it writes keeps its contract, passes its own test and is a term, installed or imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.cli.main import main
from kvfold.cli.new import KINDS
from kvfold.plugins import import_named
from kvfold.policy.policy import Policy

ROOT = Path(__file__).resolve().parents[2]


def in_folder(folder: Path, *command: str) -> str:
    path = os.pathsep.join((str(folder), str(ROOT)))
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("own_terms")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_its_own_test(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tests run in this process, where torch is imported already; they are plain functions."""
    monkeypatch.chdir(tmp_path)
    name = f"my_{kind}_2"
    assert main(["new", kind, name]) == 0
    folder = tmp_path / name
    printed = capsys.readouterr().out
    assert f"pip install -e {name}" in printed
    assert {path.name for path in folder.iterdir()} == {
        "pyproject.toml", "README.md", f"kvfold_{name}.py", f"test_{name}.py"
    }  # fmt: skip
    assert not any("$" in path.read_text() for path in folder.iterdir())
    import_named(str(folder / f"kvfold_{name}.py"))
    tests: dict[str, object] = {}
    exec((folder / f"test_{name}.py").read_text(), tests)
    called = [test() for found, test in tests.items() if found.startswith("test_") and callable(test)]
    assert len(called) == 3
    assert name in str(Policy.parse(KINDS[kind].policy.format(name=name)))


def test_an_installed_package_is_a_term(tmp_path: Path) -> None:
    """As a user does it: pip, pytest in the new folder, then the command line."""
    in_folder(tmp_path, sys.executable, "-m", "kvfold", "new", "scorer", "my_installed")
    pip = (sys.executable, "-m", "pip", "--no-input", "install", "--quiet", "--no-deps", "--no-build-isolation")
    in_folder(tmp_path, *pip, "--no-index", "--target", str(tmp_path), "./my_installed")
    ran = in_folder(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_installed")
    assert "3 passed" in ran
    shown = in_folder(tmp_path, sys.executable, "-m", "kvfold", "policies", "my_installed + 4x", "--json")
    assert json.loads(shown)["policy"] == "my_installed + 4x"


def test_names_that_cannot_be_are_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for name, told in (
        ("keydiff", '"keydiff" is a term already, of kvfold.score.keys.KeyDiff; choose another name'),
        ("My-Scorer", "must match [a-z][a-z0-9_]*"),
        ("../up", "must match"),
        ("decode", "is a word of the language"),
        ("there", "there exists already"),
    ):
        assert main(["new", "scorer", name]) == 2
        printed = capsys.readouterr()
        assert told in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with pytest.raises(SystemExit):
        main(["new", "reader", "mine"])
