"""Numba's compiler for kernels on a CPU. Compiling takes seconds on first use; the result is kept on disk."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def take(_context: Any, counter: Any) -> Any:
    """The number of the next part, for one thread only (`run_parts` in cpu_threads.py)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


def compiled(function: Any, **options: Any) -> Any:
    """Compiled to run without the GIL, and kept on disk where a folder can be written."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder
        return njit(**options)(function)
