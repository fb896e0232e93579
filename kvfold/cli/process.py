"""What is set for the whole process before PyTorch is loaded; values that the environment names are kept.

OpenMP's idle threads wait awake for 20 ms by default, on cores that kernels in other threads need next
(kvfold/pages/kernels/cpu_threads.py). glibc's malloc has an arena for every thread, and gives the pages of large blocks
back at once: a prefill, whose thread is new, would fault the memory of every large tensor in again.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SPINS = 1000  # about 0.1 ms
_KEPT_BYTES = 256 << 20  # free at the end of the heap
_LARGEST_BYTES = 32 << 20  # from the heap; larger blocks are mapped. The most that glibc takes
# malloc.h: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
_MALLOC = {"ARENA_MAX": (-8, 1), "MMAP_THRESHOLD_": (-3, _LARGEST_BYTES), "TRIM_THRESHOLD_": (-1, _KEPT_BYTES)}


def set_up_process() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for name, (parameter, value) in _MALLOC.items():
            if f"MALLOC_{name}" not in os.environ:
                mallopt(parameter, value)
