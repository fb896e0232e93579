"""Means, rankings and fronts by hand: who is compared with whom, and on which samples."""

from __future__ import annotations

import pytest

from kvfold.bench.report.cells import Point, comparisons, estimate, front, points, scope_of, weighted
from kvfold.bench.statistics import Estimate
from tests.bench.report_runs import row, rows

FULL = rows("full", "100%", [1.0, 1.0, 1.0, 0.0])


def _point(share: float, mean: float) -> Point:
    return Point(f"{share} {mean}", "", share, Estimate(mean, mean, mean, 2))


def test_each_workload_counts_the_same() -> None:
    """Three samples of one workload at 1 and one of another at 0: 1/2, not 3/4."""
    listed = rows("full", "100%", [1.0] * 3) + rows("full", "100%", [0.0], workload="needle")
    (cell,) = scope_of("all", listed).cells
    values = weighted(cell.scores, tuple(cell.scores))
    assert sum(values) / len(values) == pytest.approx(0.5)


def test_one_sample_leaves_everything_possible() -> None:
    assert estimate([0.5]) == Estimate(0.5, 0.0, 1.0, 1)
    assert estimate([0.5], -1.0) == Estimate(0.5, -1.0, 1.0, 1)


def test_a_front_holds_what_nothing_beats() -> None:
    a, b, c, d, e = _point(0.1, 0.3), _point(0.2, 0.2), _point(0.3, 0.6), _point(0.3, 0.5), _point(1.0, 0.6)
    assert front([e, d, c, b, a]) == [a, c]


def test_a_front_of_nothing_is_empty() -> None:
    assert front([]) == []


def test_points_lie_at_the_bytes_of_the_rows() -> None:
    listed = [*FULL, *rows("keydiff", "25%", [1.0, 0.0, 1.0, 0.0])]
    found = {point.policy: point for point in points(scope_of("all", listed), "known")}
    assert found["keydiff"].share == 0.25 and found["keydiff"].score.mean == 0.5 and found["full"].share == 1.0


def test_a_policy_that_is_the_same_in_two_memories_is_one_point() -> None:
    same = [row("int4", memory, 1.0, i, resident_bytes=290_000) for memory in ("100%", "50%") for i in range(4)]
    assert [point.policy for point in points(scope_of("all", FULL + same), "known")] == ["full", "int4"]


def test_rankings_by_hand() -> None:
    listed = [*FULL, *rows("worse", "25%", [0.0, 0.0, 0.0, 1.0]), *rows("better", "25%", [1.0, 1.0, 0.5, 0.0])]
    (comparison,) = comparisons(scope_of("all", listed), "known")
    better, worse = comparison.entries
    assert (better.cell.policy, better.score.mean, worse.cell.policy, worse.score.mean) == (
        "better",
        0.625,
        "worse",
        0.25,
    )
    assert better.beside and worse.beside
    assert (better.beside.difference.mean, better.beside.lost, better.beside.gained) == (
        -0.125,
        1,
        0,
    )  # half a point counts
    assert (worse.beside.difference.mean, worse.beside.lost, worse.beside.gained) == (-0.5, 3, 1)


def test_no_ranked_interval_passes_what_a_score_can_be() -> None:
    """One of two workloads has one sample in seven, and a resample may draw it more than once."""
    other = [*rows("full", "100%", [1.0] * 6), *rows("int4", "25%", [1.0] * 6)]
    needle = [*rows("full", "100%", [1.0], workload="needle"), *rows("int4", "25%", [1.0], workload="needle")]
    (comparison,) = comparisons(scope_of("all", other + needle), "known")
    (entry,) = comparison.entries
    assert entry.score.mean == pytest.approx(1.0)
    assert entry.score.high == 1.0


def test_the_full_cache_does_not_compete() -> None:
    (comparison,) = comparisons(scope_of("all", FULL + rows("int4", "100%", [1.0, 1.0, 1.0, 0.0])), "known")
    assert [entry.cell.policy for entry in comparison.entries] == ["int4"]


def test_modes_are_apart() -> None:
    listed = FULL + rows("keydiff", "25%", [1.0] * 4) + rows("full", "100%", [0.0] * 2, mode="unknown")
    scope = scope_of("all", listed)
    assert comparisons(scope, "unknown") == [] and len(comparisons(scope, "known")) == 1


def test_a_policy_that_failed_somewhere_is_not_ranked() -> None:
    """Its mean over the prompts that it could run says nothing beside means over all of them."""
    lucky = [*rows("lucky", "25%", [1.0] * 19), row("lucky", "25%", None, 19, note="too small")]
    listed = rows("full", "100%", [1.0] * 20) + lucky + rows("plain", "25%", [0.0] * 20)
    (comparison,) = comparisons(scope_of("all", listed), "known")
    assert [entry.cell.policy for entry in comparison.entries] == ["plain"]
    assert [cell.policy for cell in comparison.left_out] == ["lucky"] and comparison.left_out[0].failures == {
        "too small": 1
    }


@pytest.mark.parametrize(("num_scored", "is_ranked"), [(20, True), (18, True), (17, False)])
def test_one_sample_in_ten_may_be_missing(num_scored: int, is_ranked: bool) -> None:
    listed = rows("full", "100%", [1.0] * 20) + rows("stopped", "25%", [1.0] * num_scored)
    (comparison,) = comparisons(scope_of("all", listed), "known")
    assert bool(comparison.entries) == is_ranked
    assert comparison.num_samples == (num_scored if is_ranked else 0)


def test_a_ranking_takes_the_samples_that_all_have() -> None:
    listed = rows("full", "100%", [1.0] * 10) + rows("a", "25%", [0.0] * 9) + rows("b", "25%", [0.0] * 9 + [1.0])
    (comparison,) = comparisons(scope_of("all", listed), "known")
    assert comparison.num_samples == 9 and [entry.score.mean for entry in comparison.entries] == [0.0, 0.0]


def test_a_single_sample_ties_everyone() -> None:
    (comparison,) = comparisons(scope_of("all", FULL[:1] + rows("a", "25%", [0.0]) + rows("b", "25%", [1.0])), "known")
    assert [(entry.cell.policy, entry.tied) for entry in comparison.entries] == [("b", ("a",)), ("a", ("b",))]
