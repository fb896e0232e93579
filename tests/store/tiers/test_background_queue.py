"""Work in the background: in order, bounded, never lost by a failure, all done by flush and close."""

from __future__ import annotations

from threading import Event

import pytest

from kvfold.errors import KvfoldWarning
from kvfold.store.tiers.tiered_cache import BackgroundQueue


def test_the_queue_is_bounded_and_runs_in_order() -> None:
    queue, gate, done = BackgroundQueue(100), Event(), list[int]()

    def wait() -> None:
        gate.wait()

    assert queue.submit(60, wait)
    assert queue.submit(40, lambda: done.append(1)) and not queue.submit(1, lambda: done.append(2))
    assert not queue.flush(0.01)
    gate.set()
    assert queue.flush()
    assert queue.submit(1000, lambda: done.append(3)) and queue.flush()  # a large job runs alone
    assert done == [1, 3]
    queue.close()


def test_a_job_that_fails_does_not_end_the_others() -> None:
    queue, done = BackgroundQueue(100), list[int]()

    def fail() -> None:
        raise OSError("no")

    with pytest.warns(KvfoldWarning, match="background work"):
        assert queue.submit(1, fail) and queue.submit(1, lambda: done.append(1)) and queue.flush()
    assert done == [1]
    queue.close()


def test_closing_runs_what_is_queued_and_takes_no_more() -> None:
    queue, done = BackgroundQueue(1 << 20), list[int]()
    for number in range(50):
        assert queue.submit(1, lambda number=number: done.append(number))  # type: ignore[misc]
    queue.close()
    assert done == list(range(50)) and not queue.submit(1, lambda: None)
