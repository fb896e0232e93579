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


class _Worker:
    """A thread that runs one piece of work at a time."""

    def __init__(self) -> None:
        self._wake, self._done = Lock(), Lock()
        self._wake.acquire()
        self._done.acquire()
        self._error: BaseException | None = None
        Thread(target=self._run, name="kvfold-cpu", daemon=True).start()

    def begin(self, work: Work, begin: int, end: int) -> None:
        self._work, self._begin, self._end = work, begin, end
        self._wake.release()

    def wait(self) -> BaseException | None:
        """What the work raised, once it is over."""
        self._done.acquire()
        error, self._error = self._error, None
        return error

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            try:
                self._work(self._begin, self._end)
            except BaseException as error:
                self._error = error
            del self._work  # and what it refers to
            self._done.release()


_idle: list[_Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def _worker() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def run_shared(work: Work, cuts: Sequence[int]) -> None:
    """work(begin, end) between neighbours of `cuts`, each in a thread, the first in this one; returns when all have."""
    first, *others = pairwise(cuts)
    workers = [_worker() for _ in others]
    for worker, mine in zip(workers, others, strict=True):
        worker.begin(work, *mine)
    try:
        work(*first)
    finally:
        errors = [worker.wait() for worker in workers]
        _idle.extend(workers)
    for error in errors:
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
