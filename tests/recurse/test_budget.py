"""Bounds on calls, tokens and seconds: how many of the next calls stay within them."""

from __future__ import annotations

import pytest

from kvfold.errors import InputError
from kvfold.recurse.budget import Budget, Meter
from kvfold.recurse.usage import Usage


def _meter(budget: Budget, usage: Usage, seconds: float = 0.0) -> Meter:
    now = [0.0]
    meter = Meter(budget, clock=lambda: now[0])
    meter.usage, now[0] = usage, seconds
    return meter


def test_without_bounds_everything_is_affordable() -> None:
    assert _meter(Budget(), Usage()).affordable([10, 10]) == (2, None)


def test_calls_leave_room_for_reserved_ones() -> None:
    meter = _meter(Budget(calls=5), Usage(calls=2))
    assert meter.affordable([1] * 9) == (3, "calls")
    assert meter.affordable([1] * 9, reserved_calls=1) == (2, "calls")
    assert meter.affordable([1] * 2) == (2, None)


def test_tokens_are_counted_one_after_another() -> None:
    meter = _meter(Budget(tokens=100), Usage(tokens_read=30, tokens_generated=10))
    assert meter.affordable([20, 20, 20]) == (3, None)
    assert meter.affordable([20, 41, 1]) == (1, "tokens")
    assert meter.affordable([61]) == (0, "tokens")


def test_seconds_are_told_by_the_speed_so_far_and_the_first_call_goes_alone() -> None:
    fresh = _meter(Budget(seconds=10), Usage())
    assert fresh.starts_with_one and fresh.affordable([50] * 4) == (4, None)
    usage = Usage(calls=1, tokens_read=100, prefill_s=2.0)
    assert _meter(Budget(seconds=10), usage, seconds=2.0).affordable([150] * 4) == (2, "seconds")
    late = _meter(Budget(seconds=10), usage, seconds=10.0)
    assert late.is_late and late.affordable([1]) == (0, "seconds")


def test_the_tightest_bound_is_named() -> None:
    meter = _meter(Budget(calls=3, tokens=10), Usage())
    assert meter.affordable([5] * 5) == (2, "tokens")


@pytest.mark.parametrize("name", ["depth", "calls", "tokens", "seconds"])
def test_bounds_are_above_zero(name: str) -> None:
    with pytest.raises(InputError, match=f"the budget of {name} is 0; it is above 0, or left out"):
        Budget(**{name: 0})
