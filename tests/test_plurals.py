"""Counts in what commands print: 1 fact, 2 facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.plurals import counted

ROOT = Path(__file__).parents[1]
NOUNS = {"calls", "entries", "facts", "hits", "parts", "pieces", "replies", "requests", "retries", "texts", "turns"}


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (0, "fact", "0 facts"),
        (1, "fact", "1 fact"),
        (2, "fact", "2 facts"),
        (1, "reply", "1 reply"),
        (1200, "reply", "1,200 replies"),
        (3, "retry", "3 retries"),
        (2, "key", "2 keys"),
    ],
)
def test_a_noun_follows_its_number(number: int, noun: str, told: str) -> None:
    assert counted(number, noun) == told


def plurals_after_numbers(tree: ast.AST) -> Iterator[str]:
    """In f-strings, such as `{number} facts`."""
    for found in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for value, text in zip(found.values, found.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                word = str(text.value)[1:].split(" ")[0].strip(",.;:)?\n")
                if str(text.value).startswith(" ") and word in NOUNS:
                    yield f"line {found.lineno}: {ast.unparse(value)} {word}"


@pytest.mark.parametrize("folder", ["cli", "engine", "recurse", "serve", "train"])
def test_commands_count_by_counted(folder: str) -> None:
    """Tests of commands and servers seldom count to 1, and whoever tries a command does."""
    for path in sorted((ROOT / "kvfold" / folder).rglob("*.py")):
        assert not list(plurals_after_numbers(ast.parse(path.read_text(encoding="utf-8")))), path
