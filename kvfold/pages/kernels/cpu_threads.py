"""Threads of compiled kernels on a CPU: Python's, as many as PyTorch uses.

Kernels run without the GIL. Numba's own pools are a second set of OpenMP threads, or end the process where two threads
use them at once. A decode step whose layers run one by one wakes threads some hundred times, so they wait at
bare locks, which costs less than an executor and its futures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Lock, Thread

import numpy as np
from numpy.typing import NDArray

Work = Callable[[int, int], None]
Counter = NDArray[np.int64]

_COUNTERS = 8  # of a phase: parts that were taken and that are done, and the rest of a cache line


class _Run:
    """A piece of work for a thread."""

    def __init__(self, work: Work, begin: int, end: int) -> None:
        self._work, self._begin, self._end = work, begin, end
        self.is_started = self.is_over = False
        self.error: BaseException | None = None
        self.over = Lock()
        self.over.acquire()

    def go(self) -> None:
        try:
            self._work(self._begin, self._end)
        except BaseException as error:
            self.error = error
        del self._work  # and what it refers to


class _Worker:
    """A thread that runs one piece of work at a time, and is idle again before it tells that the piece is over."""

    def __init__(self) -> None:
        self._wake = Lock()
        self._wake.acquire()
        self._run: _Run | None = None
        Thread(target=self._loop, name="kvfold-cpu", daemon=True).start()

    def start(self, run: _Run) -> None:
        self._run = run
        run.is_started = True
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            run, self._run = self._run, None
            assert run is not None
            run.go()
            _idle.append(self)
            run.is_over = True
            run.over.release()
            del run


_idle: list[_Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def _worker() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def run_shared(work: Work, cuts: Sequence[int]) -> None:
    """work(begin, end) between neighbours of `cuts`, each in a thread, the first in this one; returns when all have.

    Kernels write to memory by its address, so nothing may go on, and free it, before all are over: not even what a
    signal raises here. Python looks for signals behind calls and when it jumps back, that is within the inner `try`.
    """
    first, *others = pairwise(cuts)
    runs: list[_Run] = []
    waiting: list[_Run] = []
    interrupt: BaseException | None = None
    try:
        for mine in others:
            run = _Run(work, *mine)
            runs.append(run)
            waiting.append(run)
            _worker().start(run)
        work(*first)
    finally:
        while waiting:
            try:
                run = waiting[-1]
                if run.is_started and not run.is_over:
                    run.over.acquire()
                waiting.pop()
            except BaseException as raised:
                interrupt = raised
    for error in (interrupt, *(run.error for run in runs)):
        if error is not None:
            raise error


def run_parts(work: Callable[[Counter], None], num_threads: int) -> None:
    """work(counter) in so many threads, which take parts of it by the counter (`take` in cpu_jit.py): one that starts
    late finds fewer left, where equal shares would keep the others waiting for it."""
    counter = np.zeros(1, dtype=np.int64)
    run_shared(lambda *_: work(counter), range(num_threads + 1))


def run_phases(work: Callable[[Counter], None], num_phases: int, num_threads: int) -> None:
    """work(counters) in so many threads, for a kernel of several phases (cpu_jit.py)."""
    phase_PX = np.zeros((num_phases, _COUNTERS), dtype=np.int64)
    run_shared(lambda *_: work(phase_PX), range(num_threads + 1))
