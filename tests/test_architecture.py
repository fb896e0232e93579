"""Pages and scripts name files, classes and functions that exist; the drawing of levels is what imports obey."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT
from tests.test_imports import LEVELS

NAMED = re.compile(r"((?:kvfold|tests|benchmarks|dev)/[\w./]+\.(?:py|sh))(?:::(\w+(?:\.\w+)*))?")
NOT_THERE = {
    "kvfold/score/vnorm.py",  # where the example of docs/extending.md would be
    "benchmarks/needle.py",  # of an older commit, which the page names
}


def _defines(path: Path, dotted: str) -> bool:
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in dotted.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("page", (*PAGES, *sorted((ROOT / "dev").glob("*.sh"))), ids=lambda page: page.name)
def test_named_files_and_names_exist(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        if path not in NOT_THERE:
            assert (ROOT / path).exists(), path
            assert not name or _defines(ROOT / path, name), f"{path}::{name}"


def test_the_check_itself_sees_names() -> None:
    assert NAMED.findall("`kvfold/session.py::Session.extend`, kvfold/core.py.") == [
        ("kvfold/session.py", "Session.extend"),
        ("kvfold/core.py", ""),
    ]
    assert _defines(ROOT / "kvfold/session.py", "Session.extend")
    assert not _defines(ROOT / "kvfold/session.py", "Session.extended")


def test_the_way_of_a_token_has_at_most_ten_stops() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    stops = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    assert stops == [str(number) for number in range(1, len(stops) + 1)]
    assert len(stops) <= 10


def test_the_drawing_of_levels_is_that_of_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.split("<!-- levels: begin")[1].split("<!-- levels: end")[0].split("```")[1].strip().splitlines()
    assert [tuple(re.split(r"\s{2,}", line)[0].split(", ")) for line in drawn] == list(LEVELS)
