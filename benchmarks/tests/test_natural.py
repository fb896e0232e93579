"""The comparison on natural questions: the same prompts on both sides, nominal bytes for presses, means over tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.natural import draw, points, table
from benchmarks.rows import ROOT
from kvfold.bench.record import ROWS, Row, read_run, write_compressed, write_run
from kvfold.errors import InputError

KEPT = ROOT / "benchmarks" / "results" / "natural_qwen2.5-coder-1.5b"


def row(policy: str, memory: str, task: str, index: int, score: float | None, share: float) -> Row:
    return Row(
        "longbench", task, 100, index, "unknown", policy, memory, policy, resident_bytes=int(1000 * share),
        full_bytes=1000, score=score,
    )  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Task a has two prompts, task b one; the prompt a/2 is too short for kvfold's policy."""
    run = read_run(KEPT / "kvfold").run
    places = [("a", 0, 1.0), ("a", 1, 0.0), ("b", 0, 1.0), ("a", 2, 1.0)]
    ours = [row("full", "100%", task, index, score, 1.1) for task, index, score in places]
    ours += [row("keydiff + int4", "25%", "a", index, 0.5, 0.2) for index in (0, 1)]
    ours += [row("keydiff + int4", "25%", "b", 0, 0.0, 0.2), row("keydiff + int4", "25%", "a", 2, None, 0)]
    peer = [row("transformers:full", "100%", task, index, score, 1.0) for task, index, score in places]
    peer += [row("kvpress:KVzip", "25%", task, index, score / 2, 1.0) for task, index, score in places]
    for side, rows in (("kvfold", ours), ("peer", peer)):
        versions = {"kvpress": "1", "transformers": "2", "torch": "3"}
        write_run(tmp_path / side, replace(run, versions=versions))
        write_compressed(tmp_path / side / ROWS, rows)
    return tmp_path


def test_points_share_their_prompts_and_weigh_tasks_alike(runs: Path) -> None:
    found, num_prompts, whole = points(runs)
    ours, press = found
    assert num_prompts == 3
    assert whole == pytest.approx((50 + 100) / 2)
    assert (ours.score, ours.loss[0], ours.share) == pytest.approx((25, -50, 0.2))
    assert ours.loss[1] <= ours.loss[0] <= ours.loss[2]
    assert (press.score, press.share, press.held) == pytest.approx((37.5, 0.25, 1.0))


def test_the_table_has_a_line_for_every_point(runs: Path) -> None:
    assert "| `kvpress:KVzip` | 25% | 100.0% | 37.5 |" in table(runs)
    assert "| `keydiff + int4` | 25% | 20.0% | 25.0 |" in table(runs)


def test_runs_over_other_prompts_are_refused(runs: Path) -> None:
    write_compressed(runs / "peer" / ROWS, [row("transformers:full", "100%", "c", 0, 1.0, 1.0)])
    with pytest.raises(InputError, match="share 0 prompts"):
        points(runs)


def test_the_page_and_the_picture_are_what_the_kept_rows_give(tmp_path: Path) -> None:
    assert table(KEPT) in (ROOT / "docs" / "research" / "peers.md").read_text(encoding="utf-8")
    draw(KEPT, tmp_path / "drawn.svg")
    kept = (ROOT / "docs" / "natural_questions.svg").read_text(encoding="utf-8")
    assert (tmp_path / "drawn.svg").read_text(encoding="utf-8") == kept
