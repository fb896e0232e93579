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
_TYPES = {  # valid_to and supersedes may be None
    (int, str, str, int, int, float, end, float, int, before, str, bytes)
    for end in (float, NoneType)
    for before in (int, NoneType)
}
_MAX_CODES = 1 << 14  # bytes of a vector


def fact_of(owner: Owner, row: Sequence[Any], path: Path) -> Fact:
    """The fact of a row that has `COLUMNS`."""
    if not _is_sound(*row):
        raise FileError(f"the memory {path} is damaged (fact {row[0]!r}); restore a copy or name another file")
    number, *rest = row
    return Fact(number, owner.user, *rest)


def _is_sound(*row: Any) -> bool:
    if tuple(map(type, row)) not in _TYPES:
        return False
    _, text, source, _, _, valid_from, valid_to, importance, _, _, embedder, embedding = row
    has_times = EARLIEST <= valid_from <= LATEST and (valid_to is None or EARLIEST <= valid_to <= LATEST)
    has_size = len(text) <= MAX_TEXT and len(source) + len(embedder) <= 2 * MAX_NAME and len(embedding) <= _MAX_CODES
    return has_times and has_size and 0 < importance <= MAX_IMPORTANCE
