"""What is printed of a run of the prompt cache's benchmark: medians, ratios to a cold prompt, and targets."""

from __future__ import annotations

import pytest

from benchmarks.server.prefix import show


def test_ratios_are_held_against_targets(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"cold": [9.0, 10.0, 11.0], "arena": [0.1], "restart": [1.5], "host": [0.5], "disk": [1.1]}
    row = {"traffic": "chats", "cache": "on", "per_s": 2.0, "read_tokens": 30, "prompt_tokens": 40}
    ratios = show({**times, "traffic": [row]})
    assert ratios == pytest.approx({"cold": 1.0, "arena": 0.01, "restart": 0.15, "host": 0.05, "disk": 0.11})
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith("0.050 of cold  target 0.05: met")
    assert lines[4].endswith("0.110 of cold  target 0.1: missed")
    assert lines[5].split() == ["chats", "cache", "on", "2.00", "requests/s", "75%", "read"]
