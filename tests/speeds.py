"""Two speeds: `make test` runs some cases of long tests, `make test-all` all of them.

Of a test in `speeds.toml` so many cases run in `make test`, evenly spread over its parameters; the others are marked
`thorough`. All cases of tests that are not in the table run in both.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

QUICK: dict[str, dict[str, int]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Cases that `make test` runs, by file and name of the test."""


def _key(item: pytest.Item) -> tuple[str, str]:
    file, _, name = item.nodeid.partition("::")
    return file, name.partition("[")[0]


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that only `make test-all` runs."""
    found = list(items)
    total, seen = Counter(map(_key, found)), Counter[tuple[str, str]]()
    for item in found:
        file, name = key = _key(item)
        number, seen[key] = seen[key], seen[key] + 1
        quick = QUICK.get(file, {}).get(name)
        if quick is not None and number * quick % total[key] >= quick:
            item.add_marker(pytest.mark.thorough)
