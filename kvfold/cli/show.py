"""Output helpers: tables and progress bars on a terminal, plain text in a pipe, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPED_WIDTH = 140  # without a terminal there is no width to fit
MAX_BINS = 64
_SHADES = " ▁▂▃▄▅▆▇█"


def console() -> Console:
    """A console on the current stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def new_table(*headings: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; `numbers` are the headings of further columns, set to the right."""
    table = Table(*headings, box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


@contextmanager
def prefill_bar(label: str, num_tokens: int) -> Iterator[Callable[[int], None] | None]:
    """A bar over the tokens of a prompt."""
    with bar(f"prefill, {label}", num_tokens) as advance:
        yield advance


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A transient progress bar; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False)
    with bars:
        task = bars.add_task(label, total=total)
        yield lambda done: bars.advance(task, done)


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
