"""Progress of downloads and conversions: rich bars on a terminal, one plain line per stage elsewhere, or nothing.

Work reports through one callable, `report(label, done, total)`: a stage begins when its label first comes and ends when
`done` reaches `total`; `total` is None while it is unknown. Callers may pass a callable of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, "int | None"], None]


def silent(label: str, done: int, total: int | None) -> None:
    """Show nothing."""


class PlainProgress:
    """One line per stage, for logs and pipes."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if label not in self._seen:
            self._seen.add(label)
            print(label, file=sys.stderr, flush=True)


class ProgressBars:
    """A rich bar for the current stage, pulsing while its length is unknown, and a line for each finished one."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if done == total:
            self._finish(label)
            return
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)

    def _finish(self, label: str) -> None:
        if label in self._tasks:
            self._progress.remove_task(self._tasks.pop(label))
        self._progress.console.print(label, highlight=False, markup=False)


@contextmanager
def reporting(progress: bool | Report) -> Iterator[Report]:
    """The report to use for `progress`: a callable as it is, True for what suits the terminal, False for silence."""
    if callable(progress):
        yield progress
    elif not progress:
        yield silent
    elif not sys.stderr.isatty():
        yield PlainProgress()
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        # The console is bound to today's stderr, and rich must not wrap it: libraries are muted by redirecting it.
        console = Console(file=sys.stderr)
        with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bars:
            yield ProgressBars(bars)
