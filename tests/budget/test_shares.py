"""Largest remainders: totals are exact, bounds hold, and nobody is a whole slot off its quota."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.budget.shares import apportion

UNBOUNDED = 10**9


def test_proportional_budgets_add_up() -> None:
    assert apportion(8192, [0.5, 0.3, 0.2], [0] * 3, [UNBOUNDED] * 3) == [4096, 2458, 1638]


def test_a_remainder_goes_to_the_lower_index() -> None:
    assert apportion(10, [1.0] * 4, [0] * 4, [UNBOUNDED] * 4) == [3, 3, 2, 2]


def test_what_one_cannot_use_goes_to_the_others() -> None:
    assert apportion(12, [1.0] * 3, [0] * 3, [2, UNBOUNDED, UNBOUNDED]) == [2, 5, 5]


def test_what_one_must_have_comes_from_the_others() -> None:
    assert apportion(12, [1.0] * 3, [8, 0, 0], [UNBOUNDED] * 3) == [8, 2, 2]


def test_bounds_beat_the_total() -> None:
    assert apportion(1, [1.0, 1.0], [3, 2], [5, 5]) == [3, 2]
    assert apportion(99, [1.0, 1.0], [3, 2], [5, 5]) == [5, 5]
    assert apportion(5, [], [], []) == []


PARTY = st.tuples(st.floats(0.01, 100), st.integers(0, 10**6), st.integers(0, 10**6))


@settings(deadline=None)
@given(st.integers(0, 10**7), st.lists(PARTY, min_size=1, max_size=8))
def test_total_is_exact_within_bounds(total: int, parties: list[tuple[float, int, int]]) -> None:
    weights = [weight for weight, _, _ in parties]
    low, high = [min(a, b) for _, a, b in parties], [max(a, b) for _, a, b in parties]
    counts = apportion(total, weights, low, high)
    assert sum(counts) == max(sum(low), min(total, sum(high)))
    assert all(lo <= count <= hi for count, lo, hi in zip(counts, low, high, strict=True))


@settings(deadline=None)
@given(st.integers(0, 10**7), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_quota_rule(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights, [0] * len(weights), [UNBOUNDED] * len(weights))
    quotas = [total * weight / sum(weights) for weight in weights]
    assert all(abs(count - quota) < 1 + 1e-6 for count, quota in zip(counts, quotas, strict=True))
