"""Reports: a bar on a terminal, lines in a pipe, silence, or the caller's own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from kvfold.models.pull.progress import PlainProgress, ProgressBars, reporting, silent


def test_progress_selects_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(label: str, done: int, total: int | None) -> None:
        """A caller's report."""

    terminal = io.StringIO()
    with reporting(own) as report:
        assert report is own
    with reporting(False) as report:
        assert report is silent
    with reporting(True) as report:
        assert isinstance(report, PlainProgress)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with reporting(True) as report:
        assert isinstance(report, ProgressBars)


def test_lines_name_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = PlainProgress()
    for done in (0, 1, 2):
        report("fetch", done, 2)
    report("convert", 0, None)
    assert capsys.readouterr().err == "fetch\nconvert\n"


def test_bars_show_the_stage_at_work_and_leave_a_line() -> None:
    screen = io.StringIO()
    with Progress(console=Console(file=screen, width=80, force_terminal=True)) as progress:
        report = ProgressBars(progress)
        report("fetch [part]", 1, 4)
        (task,) = progress.tasks
        assert (task.description, task.completed, task.total) == ("fetch [part]", 1, 4)
        report("fetch [part]", 4, 4)
        assert progress.tasks == []
        report("convert", 0, None)
        assert progress.tasks[0].total is None
    assert "fetch [part]" in screen.getvalue()
