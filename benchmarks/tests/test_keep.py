"""Shards of a run are kept as one; other runs, and answers that differ, are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.runs.keep import merge
from kvfold.bench.record import Recorded, read_run
from kvfold.errors import InputError

EXAMPLE = Path(__file__).resolve().parents[2] / "tests" / "bench" / "data" / "example_run"


def test_shards_merge_and_other_runs_stay_apart() -> None:
    whole = read_run(EXAMPLE)
    shards = [_shard(whole, index) for index in range(3)]
    other = replace(whole, run=replace(whole.run, seed=7))
    merged, apart = merge([*shards, other])
    assert sorted(merged.rows, key=lambda row: row.key) == sorted(whole.rows, key=lambda row: row.key)
    assert merged.run.shard == "0/3, 1/3, 2/3" and merged.run.commit == "c0, c1, c2" and apart == other


def _shard(whole: Recorded, index: int) -> Recorded:
    run = replace(whole.run, shard=f"{index}/3", commit=f"c{index}", command=f"--shard {index}/3")
    return replace(whole, run=run, rows=tuple(row for row in whole.rows if row.index % 3 == index))


def test_answers_that_differ_do_not_merge() -> None:
    whole = read_run(EXAMPLE)
    changed = replace(whole, rows=(replace(whole.rows[0], answer="another"),))
    with pytest.raises(InputError, match="two answers of passkey passkey 1000 0 known full 100% differ"):
        merge([whole, changed])
