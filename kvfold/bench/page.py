"""Pages of docs/ whose measured part is written by a benchmark, between two markers."""

from __future__ import annotations

from kvfold.errors import InputError


def written(page: str, begin: str, end: str, body: str) -> str:
    """The page with the part between the markers written anew."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise InputError(f"the page must hold the markers {begin} and {end} once each")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{body}\n{end}{after}"
