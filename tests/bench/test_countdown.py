"""Progress without a terminal: lines that say how far, and how long still."""

from __future__ import annotations

import time

import pytest

from kvfold.bench.countdown import Countdown, duration


@pytest.mark.parametrize(("seconds", "text"), ((0, "0:00"), (59.6, "1:00"), (90, "1:30"), (3_725, "1:02:05")))
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvfold.bench.countdown.time.monotonic", lambda: now[0])
    with Countdown("prompts", 4) as work:
        assert work.step_s == 0.0
        for passed in (4.0, 4.0, 12.0, 1.0):
            now[0] += passed
            work.step()
    assert capsys.readouterr().err.splitlines() == [
        "prompts 1/4, 0:12 left",
        "prompts 3/4, 0:07 left",
        "prompts 4/4, 0:00 left",
    ]


def test_lines_say_what_the_step_under_way_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.bench.countdown._LINE_EVERY_S", 0.01)
    with Countdown("prompts", 4) as work:
        work.tell("searching sizes")
        while "searching" not in capsys.readouterr().err:
            time.sleep(0.01)
