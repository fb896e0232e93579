"""Generated sections of docs pages, between two marker comments."""

from __future__ import annotations

from pathlib import Path

from kvfold.errors import InputError


def with_section(page: str, begin: str, end: str, body: str) -> str:
    """The page with the section between the markers replaced."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise InputError(f"the page must hold the markers {begin} and {end} once each")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{body}\n{end}{after}"


def write_section(path: Path, begin: str, end: str, body: str) -> None:
    """The same in a file."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), begin, end, body), encoding="utf-8")
