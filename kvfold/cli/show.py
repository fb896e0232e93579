"""Output helpers: tables and progress bars on a terminal, tab-separated rows and plain lines in a pipe, JSON.

What is asked for goes to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unicodedata import category

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from kvfold.models.pull.progress import repeated_line

MAX_BINS = 64
_NUMBER_WIDTH = 8
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHADES = " ▁▂▃▄▅▆▇█"


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def visible(text: str) -> str:
    """A text for a terminal: control characters, by which a document could command it, become U+FFFD."""
    return "".join(letter if letter in "\n\t" or category(letter) != "Cc" else "\ufffd" for letter in text)


class Table:
    """Rows under headings; `numbers` are the headings of further columns, set to the right.

    In a pipe: a line of headings, then a line for each row, a tab between cells; lines of a cell are joined by " | ".
    With `widths` of text columns a row is printed as it is added; a text without a width has the rest of the line.
    """

    def __init__(self, *texts: str, numbers: Sequence[str] = (), widths: Mapping[str, int] | None = None) -> None:
        self.headings = (*texts, *numbers)
        self.numbers = numbers
        self.widths = widths
        self._rows: list[tuple[str | Text, ...]] = []

    def add(self, *cells: str | Text) -> None:
        self._rows.append(cells)
        if self.widths is not None:
            self._print([cells], with_headings=len(self._rows) == 1)

    def print(self) -> None:
        """The whole table."""
        self._print(self._rows, with_headings=True)

    def _print(self, rows: Sequence[tuple[str | Text, ...]], with_headings: bool) -> None:
        if sys.stdout.isatty():
            Console(highlight=False).print(self._rich(rows, with_headings))
            return
        for cells in ([self.headings] if with_headings else []) + list(rows):
            print("\t".join(map(_plain, cells)), flush=True)

    def _rich(self, rows: Sequence[tuple[str | Text, ...]], with_headings: bool) -> RichTable:
        is_row_by_row = self.widths is not None
        style = None if is_row_by_row else box.SIMPLE_HEAD
        table = RichTable(box=style, pad_edge=False, show_header=with_headings, expand=is_row_by_row)
        for heading in self.headings:
            is_number = heading in self.numbers
            width = None
            if self.widths is not None:
                width = max(len(heading), _NUMBER_WIDTH) if is_number else self.widths.get(heading)
            table.add_column(
                heading,
                width=width,
                ratio=1 if is_row_by_row and width is None else None,
                justify="right" if is_number else "left",
                no_wrap=is_number or heading == self.headings[0],
            )
        for cells in rows:
            table.add_row(*(Text(_harmless(cell)) if isinstance(cell, str) else cell for cell in cells))
        return table


def _plain(cell: str | Text) -> str:
    return " | ".join(" ".join(_harmless(line).split()) for line in str(cell).strip().splitlines())


def _harmless(text: str) -> str:
    r"""Control characters, which could steer a terminal, as `\x1b`; tabs and line breaks stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def bar(label: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Yields a callable that takes how much was done: a transient bar, or a line every few seconds in a pipe."""
    if not sys.stderr.isatty():
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count

        with repeated_line(lambda: f"{label}: {done}/{total} {unit}".rstrip()):
            yield advance
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.advance(task, count)


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """While something of unknown length runs: a transient spinner, or a line every few seconds in a pipe."""
    if sys.stderr.isatty():
        with Console(file=sys.stderr, highlight=False).status(label):
            yield
    else:
        with repeated_line(lambda: label):
            yield


def kept_lines(positions: list[list[list[int]]], num_tokens: int) -> list[str]:
    """One line per layer: which share of each bin of positions its heads kept, and how long the heads are.

    layer  0 |█▂▂▁▃…▇█| 130..512, mean 256
    """
    return [
        f"layer {index:>2} |{_picture(heads, num_tokens)}| {_lengths(heads)}" for index, heads in enumerate(positions)
    ]


def _picture(heads: list[list[int]], num_tokens: int) -> str:
    num_bins = min(num_tokens, MAX_BINS)
    kept, size = [0] * num_bins, [0] * num_bins
    for position in range(num_tokens):
        size[position * num_bins // num_tokens] += len(heads)
    for head in heads:
        for position in head:
            kept[position * num_bins // num_tokens] += 1
    return "".join(_shade(have / of) for have, of in zip(kept, size, strict=True))


def _shade(share: float) -> str:
    """Blank means nothing at all: the smallest share is seen."""
    return _SHADES[0] if share == 0 else _SHADES[max(1, round(share * (len(_SHADES) - 1)))]


def _lengths(heads: list[list[int]]) -> str:
    lens = [len(head) for head in heads]
    return f"{min(lens)}..{max(lens)}, mean {sum(lens) / len(lens):.0f}"
