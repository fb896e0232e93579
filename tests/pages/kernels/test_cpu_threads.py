"""Work that threads share: all of it is done once, errors come back, and forks and nested calls have threads of their
own."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvfold.pages.kernels.cpu_threads import run_phases, run_shared


def shared(num_parts: int) -> list[tuple[int, int]]:
    done: list[tuple[int, int]] = []
    run_shared(lambda begin, end: done.append((begin, end)), range(0, 10 * num_parts + 1, 10))
    return sorted(done)


def test_every_part_runs_once() -> None:
    for num_parts in (1, 2, 3, 5, 2):
        assert shared(num_parts) == [(10 * index, 10 * index + 10) for index in range(num_parts)]


def test_parts_run_at_the_same_time() -> None:
    together, met = threading.Barrier(3, timeout=60), list[int]()
    run_shared(lambda begin, end: met.append(together.wait()), range(4))
    assert len(met) == 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_comes_back_when_all_have_ended(bad: int) -> None:
    done: list[int] = []

    def work(begin: int, end: int) -> None:
        if begin == bad:
            raise ValueError("a bad part")
        done.append(begin)

    with pytest.raises(ValueError, match="a bad part"):
        run_shared(work, range(4))
    assert sorted(done) == [part for part in range(3) if part != bad]
    assert len(shared(3)) == 3, "threads are used again"


def test_work_may_share_work() -> None:
    done: list[int] = []
    run_shared(lambda *_: run_shared(lambda begin, end: done.append(begin), range(3)), range(3))
    assert sorted(done) == [0, 0, 1, 1]


def test_a_signal_is_raised_when_all_have_ended() -> None:
    """Wherever it comes: kernels write to memory that the caller frees."""
    running, delays = Counter[int](), random.Random(0)

    def work(begin: int, _: int) -> None:
        if begin:  # this thread waits for the others
            running[begin] += 1
            time.sleep(0.002)
            running[begin] -= 1

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, num_threads, num_raised = signal.signal(signal.SIGALRM, interrupt), threading.active_count(), 0
    try:
        for _ in range(200):
            running.clear()
            with suppress(KeyboardInterrupt):  # one that comes late
                try:
                    signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-4, 4e-3))
                    run_shared(work, range(4))
                except KeyboardInterrupt:
                    num_raised += 1
                    assert not any(running.values())
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert num_raised > 20
    assert threading.active_count() <= num_threads + 4, "workers are idle again"


def test_a_fork_has_threads_of_its_own() -> None:
    shared(2)
    child = os.fork()
    if child == 0:
        os._exit(len(shared(2)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_phases_are_over_before_the_next_begin_and_need_no_late_thread() -> None:
    """Every part adds up what the phase before has written."""
    pytest.importorskip("numba")
    from kvfold.pages.kernels.cpu_jit import compiled, done, take, wait

    num_phases, num_parts, num_turns = 200, 7, 2000

    @compiled
    def run(phase_PX: Any, sum_PY: Any) -> None:
        for phase in range(num_phases):
            counter = phase_PX[phase]
            part = take(counter)
            while part < num_parts:
                total = 1
                for before in range(num_parts if phase else 0):
                    total += sum_PY[phase - 1, before]
                for _ in range(num_turns):  # so long that others come meanwhile
                    total = (31 * total + 7) % 1_000_003
                sum_PY[phase, part] = total
                done(counter)
                part = take(counter)
            wait(counter, num_parts)

    def work(phase_PX: NDArray[np.int64]) -> None:
        counters.append(phase_PX)
        run(phase_PX, found)

    found, expected = np.zeros((num_phases, num_parts), dtype=np.int64), [0]
    counters: list[NDArray[np.int64]] = []
    run_phases(work, num_phases, 5)
    for phase in range(num_phases):
        total = 1 + num_parts * expected[-1] if phase else 1
        for _ in range(num_turns):
            total = (31 * total + 7) % 1_000_003
        expected.append(total)
    assert (found == np.array(expected[1:])[:, None]).all()
    run(counters[0], np.full_like(found, -1))  # as a thread does that comes when all is over
    assert (counters[0][:, 1] == num_parts).all()
