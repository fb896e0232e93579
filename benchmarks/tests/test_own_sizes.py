"""Policies of their own size beside a curve of fixed sizes, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.runs.own_sizes import compare, main
from kvfold.bench.record import Row, read_run
from kvfold.errors import InputError
from tests.bench.report_runs import row, rows, write

FIXED, CHOSEN = "kvzip + global", "kvzip + adaptive(loss=0.02, window=none)"
CURVE = [*rows("full", "100%", [1.0, 1.0]), *rows(FIXED, "40%", [1.0, 1.0]), *rows(FIXED, "20%", [0.0, 0.0])]


def own(scores: tuple[float, float], shares: tuple[int, int]) -> list[Row]:
    """Percent of the full cache that each sample took."""
    found = (row(CHOSEN, f"{share}%", score, i) for i, (score, share) in enumerate(zip(scores, shares, strict=True)))
    return [replace(each, memory="own") for each in found]


def test_between_two_sizes_the_curve_is_straight(tmp_path: Path) -> None:
    """30 % on average: the curve has 0.5 there, and 0.75 at 35 %."""
    (found,) = compare(read_run(write(tmp_path / "run", [*CURVE, *own((1.0, 0.5), (10, 50))])), [FIXED], "score")
    assert (found.policy, found.num_samples, found.value) == (CHOSEN, 2, 0.75)
    assert found.share == pytest.approx(0.3)
    assert found.gain is not None and found.gain.mean == pytest.approx(0.25)
    assert found.times_bytes == pytest.approx(0.35 / 0.3)


def test_fixed_sizes_may_be_policies_of_their_own(tmp_path: Path) -> None:
    curve = [replace(r, policy=f"{FIXED} + {r.memory}mem", memory="own") if r.policy == FIXED else r for r in CURVE]
    run = read_run(write(tmp_path / "run", [*curve, *own((1.0, 0.5), (10, 50))]))
    (found,) = compare(run, [f"{FIXED} + 40%mem", f"{FIXED} + 20%mem"], "score")
    assert found.policy == CHOSEN and found.times_bytes == pytest.approx(0.35 / 0.3)


def test_beyond_the_curve_nothing_is_said(tmp_path: Path) -> None:
    (found,) = compare(read_run(write(tmp_path / "run", [*CURVE, *own((0.0, 0.0), (10, 12))])), [FIXED], "score")
    assert found.gain is None and found.times_bytes == pytest.approx(0.2 / 0.11)


def test_divergence_may_be_compared_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverged = {"100%": 0.0, "40%": 0.1, "20%": 0.3, "own": 0.1}
    listed = [replace(each, kl=diverged[each.memory]) for each in [*CURVE, *own((0.0, 0.0), (20, 40))]]
    folder = write(tmp_path / "run", listed)
    (found,) = compare(read_run(folder), [FIXED], "kl")
    assert found.gain is not None and found.gain.mean == pytest.approx(0.1)
    main([str(folder), "--fixed", FIXED, "--by", "kl"])
    assert "+0.10 [+0.10, +0.10]   1.33 x" in capsys.readouterr().out


def test_a_run_without_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no policy in the memory own"):
        compare(read_run(write(tmp_path / "run", CURVE)), [FIXED], "score")
