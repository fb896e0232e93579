"""Rows of a memory's file as facts; one that no kvfold wrote is damage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from kvfold.errors import FileError
from kvfold.memory.dates import EARLIEST, LATEST
from kvfold.memory.fact import MAX_IMPORTANCE, MAX_NAME, MAX_TEXT, Fact, Owner

COLUMNS = 'id, text, source, start, "end", valid_from, valid_to, importance, uses, supersedes, embedder, embedding'
_TYPES = (int, str, str, int, int, float, float, float, int, int, str, bytes)
_MAY_BE_NONE = (6, 9)  # valid_to, supersedes
_MAX_CODES = 1 << 14  # bytes of a vector


def fact_of(owner: Owner, row: Sequence[Any], path: Path) -> Fact:
    """The fact of a row that has `COLUMNS`."""
    if not _is_sound(*row):
        raise FileError(f"the memory {path} is damaged (fact {row[0]!r}); restore a copy or name another file")
    number, *rest = row
    return Fact(number, owner.user, *rest)


def _is_sound(*row: Any) -> bool:
    _, text, source, _, _, valid_from, valid_to, importance, _, _, embedder, embedding = row
    times = [valid_from] if valid_to is None else [valid_from, valid_to]
    kinds = [type(value) for value in row]
    if any(
        kind is not wanted and not (kind is NoneType and at in _MAY_BE_NONE)
        for at, (kind, wanted) in enumerate(zip(kinds, _TYPES, strict=True))
    ):
        return False
    has_size = len(text) <= MAX_TEXT and len(source) + len(embedder) <= 2 * MAX_NAME and len(embedding) <= _MAX_CODES
    return has_size and 0 < importance <= MAX_IMPORTANCE and all(EARLIEST <= time <= LATEST for time in times)
