"""Threads of compiled kernels on a CPU: Python's, as many as PyTorch uses.

Kernels run without the GIL. Numba's own pools are a second set of OpenMP threads, or end the process where two threads
use them at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise


@cache
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Threads do not survive a fork, so a process has its own."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kvfold-cpu")


def run_shared(work: Callable[[int, int], None], cuts: Sequence[int]) -> None:
    """work(begin, end) between neighbours of `cuts`, each in a thread, the first in this one; returns when all have."""
    first, *others = pairwise(cuts)
    waiting = []
    if others:
        pool = _pool(len(others), os.getpid())
        waiting = [pool.submit(work, *mine) for mine in others]
    try:
        work(*first)
    finally:
        for other in waiting:
            other.result()
