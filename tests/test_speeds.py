"""The table of long tests names tests that exist, so that a renamed one is not forgotten in it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.speeds import QUICK

ROOT = Path(__file__).parents[1]


def test_every_test_of_the_table_exists() -> None:
    for file, names in QUICK.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(names) <= found, f"{file}: {sorted(set(names) - found)}"


def test_every_test_of_the_table_has_a_number_of_cases() -> None:
    for file, names in QUICK.items():
        assert names, f"{file} has no tests in tests/speeds.toml"
        assert all(type(cases) is int and cases >= 0 for cases in names.values()), f"{file}: {names}"
