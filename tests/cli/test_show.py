"""Rendering helpers: units, and the picture of kept positions."""

from __future__ import annotations

import threading

import pytest

from kvfold.cli.show import MAX_BINS, Table, bar, kept_lines, waiting
from kvfold.models.pull.progress import repeated_line
from kvfold.policy.size import bytes_text
from tests.cli.conftest import Terminal


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (23_547_840, "23.5 MB"),
        (999_499_999, "999.5 MB"),
        (2.5e12, "2500.0 GB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert bytes_text(number) == text


def test_a_short_prompt_has_a_bin_per_token() -> None:
    lines = kept_lines([[[0, 1, 5], [0, 5]], [[0], [0, 1, 2, 3, 4, 5]]], 6)
    assert lines == ["layer  0 |█▄   █| 2..3, mean 2", "layer  1 |█▄▄▄▄▄| 1..6, mean 4"]


def test_a_single_slot_among_many_is_seen() -> None:
    (line,) = kept_lines([[[50_000]]], 100_000)
    picture = line.split("|")[1]
    assert len(picture) == MAX_BINS
    assert picture.strip() == "▁"
    assert picture.index("▁") == MAX_BINS // 2


def test_a_table_in_a_pipe_is_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("policy", "answer", numbers=("ratio",))
    table.add("int4 [4]", "one\n  two \nthree  ", "2.94x")
    table.print()
    assert capsys.readouterr().out == "policy\tanswer\tratio\nint4 [4]\tone | two | three\t2.94x\n"


def test_rows_with_known_widths_are_printed_as_they_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table("policy", "answer", numbers=("ratio",), widths={"policy": 10})
    table.add("int4", "yes", "2.94x")
    assert capsys.readouterr().out == "policy\tanswer\tratio\nint4\tyes\t2.94x\n"
    table.add("full", "no", "1.00x")
    assert capsys.readouterr().out == "full\tno\t1.00x\n"
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    table = Table("policy", "answer", numbers=("ratio",), widths={"policy": 10})
    for number in range(2):
        table.add("int4", "a long answer that goes on " * number, "2.94x")
    lines = [line for line in screen.getvalue().splitlines() if "2.94x" in line]
    assert len({line.index("2.94x") for line in lines}) == 1 and len(lines) == 2


def test_long_work_in_a_pipe_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = threading.Event()
    lines: list[str] = []

    def text() -> str:
        lines.append(f"prefill: {len(lines)}/9 tokens")
        if len(lines) > 2:
            told.set()
        return lines[-1]

    with repeated_line(text, 0.001):
        assert told.wait(60)
    assert capsys.readouterr().err.startswith("prefill: 0/9 tokens, 0 s\nprefill: 1/9 tokens, 0 s\n")
    with bar("prefill", 9, "tokens") as advance, waiting("load"):
        advance(1)
    assert capsys.readouterr().err == ""  # over within seconds
