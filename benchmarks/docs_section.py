"""Generated sections of docs pages, between two marker comments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands import argument_parser
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


@dataclass(frozen=True)
class Section:
    """A section of a page that `python -m benchmarks.WRITER` makes of rows that are kept."""

    page: Path
    name: str
    writer: str
    make_body: Callable[[], str]

    @property
    def markers(self) -> tuple[str, str]:
        begin = f"<!-- {self.name}: begin; written by `python -m benchmarks.{self.writer}` -->"
        return begin, f"<!-- {self.name}: end -->"

    def rewritten(self) -> str:
        """The page with the section as the rows give it."""
        return with_section(self.page.read_text(encoding="utf-8"), *self.markers, self.make_body())

    def main(self, about: str | None, arguments: Sequence[str]) -> None:
        """The command without options; `about` is the docstring of its module."""
        argument_parser(self.writer, about).parse_args(arguments)
        self.page.write_text(self.rewritten(), encoding="utf-8")
