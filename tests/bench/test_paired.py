"""Two policies of a run on the same samples, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench.paired import compare, line
from kvfold.bench.record import read_run
from kvfold.cli.main import main
from kvfold.errors import InputError
from tests.bench.report_runs import rows, write

FULL = [*rows("full", "100%", [1.0, 1.0]), *rows("full", "100%", [0.5, 0.5, 0.5, 0.5], workload="kv")]
MINE = [*rows("int4", "25%", [1.0, 0.5]), *rows("int4", "25%", [0.5, 0.5, 0.0, 0.0], workload="kv")]


def test_every_task_counts_the_same(tmp_path: Path) -> None:
    """0.75 and 0.25 against 1 and 0.5; by samples it would be 2.5 of 6 against 4."""
    listed = [replace(row, bytes_per_step=row.resident_bytes // 5) for row in [*FULL, *MINE]]
    (found,) = compare(read_run(write(tmp_path / "run", listed)), "int4", "full")
    assert (found.memory, found.num_samples, found.score, found.other_score) == ("25%", 6, 0.5, 0.75)
    assert found.difference.mean == -0.25 and found.difference.low <= -0.25 <= found.difference.high
    assert (found.held, found.other_held) == (0.25, 1.0) and found.read_of_held == pytest.approx(0.2)
    assert "50.00 against  75.00: -25.00 [" in line(found) and "relative -33.33% " in line(found)


def test_samples_that_one_lacks_are_left_out(tmp_path: Path) -> None:
    other = rows("keydiff", "25%", [0.0, None])
    run = read_run(write(tmp_path / "run", [*FULL, *MINE, *other, *rows("keydiff", "25%", [1.0, 0.0], workload="kv")]))
    (found,) = compare(run, "int4", "keydiff")
    assert found.num_samples == 3 and found.difference.mean == pytest.approx((1.0 + 0.0) / 2)
    with pytest.raises(InputError, match='of both "int4" and "nothing"'):
        compare(run, "int4", "nothing")


def test_the_command_prints_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", [*FULL, *MINE])
    assert main(["report", str(run), "--paired", "int4", "full"]) == 0
    assert "50.00 against  75.00: -25.00 [" in capsys.readouterr().out
    assert main(["report", str(run), "--paired", "int4", "nothing"]) == 2
    assert 'of both "int4" and "nothing"' in capsys.readouterr().err
