"""Progress of downloads and conversions: rich bars on a terminal, plain lines elsewhere, or nothing.

Work reports through one callable, `report(label, done, total)`: a stage begins when its label first comes and ends when
`done` reaches `total`; `total` is None while it is unknown. Callers may pass a callable of their own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, "int | None"], None]
LINE_EVERY_S = 5.0  # of long work, where there is no terminal


def silent(label: str, done: int, total: int | None) -> None:
    """Show nothing."""


@contextmanager
def repeated_line(text: Callable[[], str], every_s: float | None = None) -> Iterator[None]:
    """Print `text()` and the seconds so far on stderr, again and again; nothing if it is over before the first."""
    began, is_over, every_s = time.monotonic(), threading.Event(), every_s or LINE_EVERY_S

    def tell() -> None:
        while not is_over.wait(every_s):
            print(f"{text()}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class PlainProgress:
    """One line per stage, for logs and pipes; `text` is how far the current one is."""

    def __init__(self) -> None:
        self.text = "start"
        self._seen: set[str] = set()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        self.text = f"{label}: {done / total:.0%}" if total else label
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
            if label in self._tasks:
                self._progress.remove_task(self._tasks.pop(label))
            self._progress.console.print(label, highlight=False, markup=False)
            return
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)


@contextmanager
def reporting(progress: bool | Report) -> Iterator[Report]:
    """The report to use for `progress`: a callable as it is, True for what suits the terminal, False for silence."""
    if callable(progress):
        yield progress
    elif not progress:
        yield silent
    elif not sys.stderr.isatty():
        plain = PlainProgress()
        with repeated_line(lambda: plain.text):
            yield plain
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        # The console is bound to today's stderr, and rich must not wrap it: libraries are muted by redirecting it.
        console = Console(file=sys.stderr)
        with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bars:
            yield ProgressBars(bars)
