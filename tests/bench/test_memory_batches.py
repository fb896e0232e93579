"""Caches go into memory in runs that are expected to fit."""

from __future__ import annotations

import pytest

from kvfold.bench.batched_eval import fitting_batches
from kvfold.pages.arena import Arena

MIB = 2**20


@pytest.mark.parametrize(
    ("megabytes", "runs"),
    [
        ([], []),
        ([3, 3, 3], [[3, 3, 3]]),
        ([4, 4, 4, 1], [[4, 4], [4, 1]]),
        ([20, 1, 20], [[20], [1], [20]]),  # what does not fit by itself is tried all the same
    ],
)
def test_runs_hold_what_is_expected_to_fit(megabytes: list[int], runs: list[list[int]]) -> None:
    arena = Arena(11 * MIB)
    assert list(fitting_batches(megabytes, lambda count: count * MIB, arena)) == runs
