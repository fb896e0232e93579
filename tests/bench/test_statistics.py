"""Intervals by hand, the share of intervals that hold the true mean, and rankings with and without ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from kvfold.bench.statistics import Estimate, mean_interval, paired_difference, ranked
from kvfold.errors import InputError

HARD_TO_EASY = [0.1 * i for i in range(20)]  # how well any policy does depends mostly on the sample


def test_two_samples_by_hand() -> None:
    """Resamples of (0, 1) have means 0, 1/2, 1/2, 1: a quarter lies at each end, far more than 2.5 %."""
    assert mean_interval([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)


def test_coins_by_hand() -> None:
    """Means of resamples of 50 ones and 50 zeros are binomial: sd 0.05, so 0.5 ± 1.96 x 0.05, in steps of 0.01."""
    found = mean_interval([0.0, 1.0] * 50, resamples=20_000)
    assert found.mean == 0.5
    assert (found.low, found.high) == pytest.approx((0.40, 0.60), abs=0.0101)


def test_samples_all_alike_leave_no_doubt() -> None:
    assert mean_interval([0.25] * 5) == Estimate(0.25, 0.25, 0.25, 5)


def test_the_seed_decides() -> None:
    samples = np.random.default_rng(3).normal(size=30).tolist()
    assert mean_interval(samples, seed=1) == mean_interval(samples, seed=1) != mean_interval(samples, seed=2)


def _coverage(experiments: NDArray[np.float64], true_mean: float) -> float:
    found = [mean_interval(row.tolist(), resamples=500, seed=i) for i, row in enumerate(experiments)]
    return sum(one.low <= true_mean <= one.high for one in found) / len(found)


def test_intervals_hold_the_true_mean_about_95_times_in_100() -> None:
    """600 experiments of 40 samples: percentile intervals of this size are known to cover a little less than 95 %."""
    random = np.random.default_rng(7)
    assert 0.91 <= _coverage(random.normal(size=(600, 40)), 0.0) <= 0.97
    assert 0.89 <= _coverage(random.exponential(size=(600, 40)), 1.0) <= 0.97


def test_intervals_of_five_samples_are_too_narrow_as_stated() -> None:
    assert 0.80 <= _coverage(np.random.default_rng(8).normal(size=(1500, 5)), 0.0) <= 0.86


def test_a_pair_is_surer_than_its_parts() -> None:
    better = [score + 0.05 + 0.01 * (i % 2) for i, score in enumerate(HARD_TO_EASY)]
    found = paired_difference(better, HARD_TO_EASY)
    assert found.mean == pytest.approx(0.055)
    assert 0.05 <= found.low < found.mean < found.high <= 0.06
    apart = mean_interval(better), mean_interval(HARD_TO_EASY)
    assert apart[0].low < apart[1].high  # the intervals of the means overlap widely


def test_a_difference_changes_sign_with_its_order() -> None:
    found = paired_difference([0.0, 0.1, 0.0, 0.2], [0.5, 0.4, 0.9, 0.8])
    assert found.mean == pytest.approx(-0.575) and found.high < 0 and found.excludes_zero


def test_a_difference_that_may_be_none_is_not_significant() -> None:
    assert not paired_difference([0.0, 1.0] * 8, [1.0, 0.0] * 8).excludes_zero
    assert not paired_difference([0.5, 0.7], [0.5, 0.7]).excludes_zero


def test_ranking_names_ties_best_first() -> None:
    noise = [0.3 if i % 2 else -0.3 for i in range(20)]
    scores = {
        "low": [score - 0.5 for score in HARD_TO_EASY],
        "noisy": [score + shift - 0.01 for score, shift in zip(HARD_TO_EASY, noise, strict=True)],
        "plain": HARD_TO_EASY,
    }
    found = ranked(scores)
    assert [(place.name, place.tied) for place in found] == [("plain", ("noisy",)), ("noisy", ("plain",)), ("low", ())]
    assert [place.estimate for place in found] == [mean_interval(scores[place.name]) for place in found]


def test_ranking_judges_pairs_as_paired_differences() -> None:
    random = np.random.default_rng(5)
    scores = {name: random.normal(shift, 1.0, 30).tolist() for name, shift in (("a", 0.0), ("b", 0.3), ("c", 0.6))}
    for place in ranked(scores):
        others = [name for name in scores if name != place.name]
        open_ = {name for name in others if not paired_difference(scores[place.name], scores[name]).excludes_zero}
        assert set(place.tied) == open_


def test_equal_means_stand_in_the_order_they_came() -> None:
    found = ranked({"b": [0.0, 1.0], "a": [1.0, 0.0]})
    assert [place.name for place in found] == ["b", "a"]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({}, "no scores"),
        ({"a": [1.0]}, "a holds 1 of the 2"),
        ({"a": [1.0, math.nan]}, "no finite number"),
        ({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]}, r"\(a 2, b 3\)"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(scores: dict[str, list[float]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ranked(scores)


def test_no_resamples_are_refused() -> None:
    with pytest.raises(InputError, match="0 resamples"):
        mean_interval([1.0, 2.0], resamples=0)
