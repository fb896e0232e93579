"""Numba's compiler for kernels on a CPU. Compiling takes seconds on first use; the result is kept on disk.

A kernel of several phases runs in several threads, each of which goes through all of them. Threads take the parts of a
phase as they come (`take`) and count those that are done (`done`); one that finds none left waits for the others
(`wait`). So none waits for a thread that starts late: there are fewer parts left for it, or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_INT = ir.IntType(64)
_LINE = 64  # bytes of a cache line
_SPINS = 2000  # looks at the count, before a waiting thread lets others run


def _place(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
    """Of an element of the first argument."""
    view = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(view.data, [_INT(number)])


@intrinsic
def take(_context: Any, counter: Any) -> Any:
    """The number of the next part, for one thread only (`run_parts` in cpu_threads.py)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, signature, arguments, 0), _INT(1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def done(_context: Any, counter: Any) -> Any:
    """Count a part that is done."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("add", _place(context, builder, signature, arguments, 1), _INT(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), generate


@intrinsic
def wait(_context: Any, counter: Any, _num_parts: Any) -> Any:
    """Until so many parts are done."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments, 1)
        kind = ir.FunctionType(ir.IntType(32), [])
        let_others_run = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
        before = builder.block
        head, again, long, behind = (builder.append_basic_block(name) for name in ("head", "again", "long", "behind"))
        builder.branch(head)
        builder.position_at_end(head)
        spins = builder.phi(_INT)
        spins.add_incoming(_INT(0), before)
        is_over = builder.icmp_signed(">=", builder.load_atomic(place, "acquire", 8), arguments[1])
        builder.cbranch(is_over, behind, again)
        builder.position_at_end(again)
        more = builder.add(spins, _INT(1))
        spins.add_incoming(more, again)
        builder.cbranch(builder.icmp_signed("<", spins, _INT(_SPINS)), head, long)
        builder.position_at_end(long)
        builder.call(let_others_run, [])
        spins.add_incoming(more, long)
        builder.branch(head)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    return types.void(counter, types.int64), generate


@intrinsic
def pointer_to(_context: Any, address: Any) -> Any:
    """An address as a pointer, for `numba.carray` of what lies anywhere."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def compiled(function: Any, **options: Any) -> Any:
    """Compiled to run without the GIL, and kept on disk where a folder can be written."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder
        return njit(**options)(function)


@compiled
def floats_on_line(count: int) -> Any:
    """Room for so many fp32 numbers, from where a cache line begins."""
    room = np.empty(count + _LINE // 4, np.float32)
    first = -room.ctypes.data % _LINE // 4
    return room[first : first + count]


@compiled
def address_of(array: Any) -> int:
    """As a signed number: numba makes sums of signed and unsigned ones floats."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]
