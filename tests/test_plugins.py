"""Terms and workloads of other packages: entry points, `--import`, KVFOLD_IMPORT; each in a process of its own."""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvfold.errors import InputError, PolicyError
from kvfold.plugins import import_named
from kvfold.policy.registry import Term, find, register

ROOT = Path(__file__).resolve().parents[1]
SCORER = '''
from dataclasses import dataclass

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View


@register("score", "{name}", paper="none", published="as published")
@dataclass(frozen=True)
class Newest(Scorer):
    """Keep the newest slots."""

    def score(self, view: View):
        return view.position_RS.float()
'''
WORKLOAD = """
from dataclasses import dataclass
from typing import ClassVar

from kvfold.bench.workloads import Sample, Workload, workload


@workload
@dataclass(frozen=True)
class Echo(Workload):
    name: ClassVar[str] = "echo"
    summary: ClassVar[str] = "say the word again"
    source: ClassVar[str] = "none"
    metric: ClassVar[str] = "exact"
    differences: ClassVar[str] = "none"
    tasks: ClassVar[tuple[str, ...]] = ("echo",)

    def build(self, setting, task, index, random):
        return Sample(task, index, "word", "which word?", ("word",), 4)

    def score(self, sample, reply):
        return float("word" in reply)
"""


def kvfold(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((environment.pop("PYTHONPATH", ""), str(ROOT)))
    command = [sys.executable, "-m", "kvfold", *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def install(folder: Path, group: str, module: str) -> None:
    """As pip would: a module, and the metadata of its distribution."""
    found = folder / "mine-1.0.dist-info"
    found.mkdir(exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(f"[{group}]\nmine = {module}\n")


def test_a_file_and_a_module_of_the_user_add_terms(tmp_path: Path) -> None:
    (tmp_path / "my_scorer.py").write_text(SCORER.format(name="newest"))
    for name in ("my_scorer", "my_scorer.py", tmp_path / "my_scorer.py"):
        done = kvfold("--import", name, "policies", "newest + 4x", cwd=tmp_path)
        assert done.returncode == 0 and "newest + 4x" in done.stdout, done.stderr
    by_variable = kvfold("policies", "newest", cwd=tmp_path, KVFOLD_IMPORT="my_scorer")
    assert "Keep the newest slots" in by_variable.stdout
    without = kvfold("policies", "newest + 4x", cwd=tmp_path)
    assert without.returncode == 2 and 'no term "newest"' in without.stderr


def test_installed_packages_add_terms_and_workloads(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(SCORER.format(name="theirs"))
    install(tmp_path, "kvfold.terms", "theirs")
    found = kvfold("policies", "theirs + 2x", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert found.returncode == 0 and "theirs + 2x" in found.stdout, found.stderr
    (tmp_path / "echoing.py").write_text(WORKLOAD)
    install(tmp_path, "kvfold.workloads", "echoing")
    listed = kvfold("bench", "--list", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert listed.returncode == 0 and "say the word again" in listed.stdout, listed.stderr


def test_a_broken_package_is_left_out_and_told(tmp_path: Path) -> None:
    install(tmp_path, "kvfold.terms", "nowhere.to.be.found")
    done = kvfold("policies", "int4", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "warning: entry point" in done.stderr and "of mine" in done.stderr


def test_what_the_user_names_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "again.py").write_text(SCORER.format(name="keydiff"))
    for name, told in (
        ("broken.py", "ZeroDivisionError"),
        ("nowhere", "ModuleNotFoundError"),
        ("missing.py", "no Python file"),
        ("leaves.py", "SystemExit"),
        ("again.py", "by kvfold.score.keys.KeyDiff and again.Newest"),
    ):
        done = kvfold("--import", name, "policies", "int4", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr, done.stderr


def test_a_module_that_is_named_twice_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n")
    for _ in range(2):
        import_named(str(tmp_path / "counted.py"))
    assert sys.counted == 1  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="cannot be imported"):
        import_named("a module")


def registering(folder: Path, name: str, module: str = "my_scorer") -> str:
    folder.mkdir(exist_ok=True)
    path = folder / f"{module}.py"
    path.write_text(SCORER.format(name=name))
    return str(path)


@pytest.mark.usefixtures("own_terms")
def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    first, second = registering(tmp_path / "a", "of_a"), registering(tmp_path / "b", "of_b")
    hides_pythons = registering(tmp_path, "of_random", module="random")
    for path in (first, second, hides_pythons, first):
        import_named(path)
    files = {name: found.file for name in ("of_a", "of_b", "of_random") if (found := find(name)) is not None}
    assert files == {"of_a": first, "of_b": second, "of_random": hides_pythons}
    assert random.__name__ == "random" and sys.modules["random"] is random


@pytest.mark.usefixtures("own_terms")
def test_a_class_of_the_same_name_in_another_file_is_refused(tmp_path: Path) -> None:
    """Two programs are `__main__` one after the other, as two modules may be found under one name."""
    first, second = registering(tmp_path / "c", "of_c"), registering(tmp_path / "d", "of_c")
    runpy.run_path(first, run_name="main_of_test")
    runpy.run_path(first, run_name="main_of_test")  # the same file again takes the place of what it registered
    told = f"by main_of_test.Newest in {first} and main_of_test.Newest in {second}"
    with pytest.raises(PolicyError, match=re.escape(told)):
        runpy.run_path(second, run_name="main_of_test")


@pytest.mark.usefixtures("own_terms")
def test_a_cell_of_a_notebook_runs_again() -> None:
    """What a notebook defines is of `__main__`, which has no file there; code of a cell is compiled for itself."""
    notebook = types.ModuleType("notebook_of_test")
    sys.modules[notebook.__name__] = notebook
    for power in (1, 2):
        cell = SCORER.format(name="of_notebook").replace("view.position_RS", f"{power} * view.position_RS")
        exec(compile(cell, f"<cell {power}>", "exec"), vars(notebook))
    found = find("of_notebook")
    assert found is not None and found.variant is notebook.Newest


def test_a_name_that_is_taken_names_both_places() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Mine(Term):
        """Mine."""

    with pytest.raises(PolicyError, match=r'"snapkv" is registered twice, by kvfold.score.snapkv.SnapKV and tests\.'):
        register("score", "snapkv")(Mine)
