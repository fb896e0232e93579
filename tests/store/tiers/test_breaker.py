"""The breaker: open after failures in a row, one try after a pause."""

from __future__ import annotations

from kvfold.store.tiers.redis import Breaker
from tests.store.common import Clock


def test_it_opens_after_failures_in_a_row_and_lets_one_try_after_a_pause() -> None:
    clock = Clock()
    breaker = Breaker(num_failures=3, pause_s=5, clock=clock)
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        assert breaker.enter() and not breaker.is_open
        outcome()
    assert breaker.enter()
    breaker.failed()
    assert breaker.is_open and not breaker.enter()
    clock.now += 5
    assert not breaker.is_open and breaker.enter() and not breaker.enter()  # the second waits for the first
    breaker.failed()
    clock.now += 4.9
    assert not breaker.enter()
    clock.now += 0.1
    assert breaker.enter()
    breaker.succeeded()
    assert all(breaker.enter() for _ in range(3))
