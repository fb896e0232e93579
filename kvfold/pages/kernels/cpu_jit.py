"""Numba's compiler for kernels on a CPU. Compiling takes seconds on first use; the result is kept on disk."""

from __future__ import annotations

from typing import Any

from numba import njit


def compiled(function: Any, **options: Any) -> Any:
    """Compiled to run without the GIL, and kept on disk where a folder can be written."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder
        return njit(**options)(function)
