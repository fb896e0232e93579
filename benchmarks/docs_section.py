"""Generated sections of docs pages, between two marker comments."""

from __future__ import annotations

from kvfold.errors import InputError


def with_section(page: str, begin: str, end: str, body: str) -> str:
    """The page with the section between the markers replaced."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise InputError(f"the page must hold the markers {begin} and {end} once each")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{body}\n{end}{after}"
