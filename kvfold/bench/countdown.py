"""Progress and remaining time of a run: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvfold.models.pull.progress import repeated_line

_LINE_EVERY_S = 10.0


class Countdown:
    """Counts steps of equal work; `step_s` is their mean time."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self.doing = ""  # what the step under way does now
        self._began = time.monotonic()
        self._shown = -_LINE_EVERY_S
        self._running = ExitStack()
        self._bar = _bar() if sys.stderr.isatty() else None
        self._task = self._bar.add_task(label, total=total, left="", doing="") if self._bar else None

    @property
    def step_s(self) -> float:
        return (time.monotonic() - self._began) / max(self.done, 1) if self.done else 0.0

    @property
    def left(self) -> str:
        return duration(self.step_s * (self.total - self.done)) + " left"

    def step(self, result: str = "") -> None:
        """One more is done; `result` is printed, if there is one."""
        self.done += 1
        if self._bar and self._task is not None:
            if result:
                self._bar.console.print(result, markup=False, highlight=False)
            self._bar.update(self._task, completed=self.done, left=self.left)
            return
        if result:
            print(result, file=sys.stderr, flush=True)
        if self.done == self.total or time.monotonic() - self._began - self._shown >= _LINE_EVERY_S:
            self._shown = time.monotonic() - self._began
            print(f"{self.label} {self.done}/{self.total}, {self.left}", file=sys.stderr, flush=True)

    def tell(self, doing: str) -> None:
        """What the step under way does now."""
        self.doing = doing
        if self._bar and self._task is not None:
            self._bar.update(self._task, doing=doing)

    def __enter__(self) -> Countdown:
        lines = repeated_line(lambda: " ".join([self.label, f"{self.done}/{self.total}", self.doing]), _LINE_EVERY_S)
        self._running.enter_context(self._bar or lines)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()


def duration(seconds: float) -> str:
    """90 -> "1:30"."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    fields = (TextColumn("{task.fields[left]}"), TextColumn("{task.fields[doing]}", markup=False))
    return Progress(*columns, *fields, console=Console(file=sys.stderr))
