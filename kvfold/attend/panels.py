"""What kernels of attention for AVX-512 and for AMX share: panels of rows, the softmax of their scores, their output.

H KV heads   G query heads per KV head   T queries
R rows of a KV head: query t of head g is row t * G + g
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvfold.pages.kernels.avx512 import (
    LANES,
    LOG2E,
    OUTPUTS,
    at,
    emitted,
    everywhere,
    exponential,
    exponentials,
    fma,
    index,
    load,
    loop,
    pointer,
    powers_of_2,
    spread,
    store,
    store_columns,
)
from kvfold.pages.kernels.cpu_jit import compiled

COLUMN = 4 * LANES  # bytes
UNROLLED = 4  # slots of a turn of a loop

Turns = Sequence[tuple[int, Any, Any]]


def _larger(builder: Any, found: Any, most: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", found, most), found, most)


class Softmax:
    """Scores of a panel, [slot, 16 rows], become weights. `state`: largest score, sum of weights, and what the output
    is to be scaled by, [3, panel, 16 rows]; `scale`: where it is."""

    def __init__(
        self, builder: Any, score: Any, state: Any, scale: Any, most_panels: int, *, is_rounded: bool = False
    ) -> None:
        self._builder, self._score = builder, pointer(builder, score)
        self._places = [at(builder, pointer(builder, state), index(LANES * most_panels * i)) for i in range(3)]
        self._is_rounded = is_rounded
        self._factor = spread(builder, builder.load(pointer(builder, scale)))

    def begin(self, turns: Turns) -> Any:
        """The sum of the weights before. `turns`: how many slots at a time, from which one to which."""
        builder = self._builder
        most_at, sum_at, alpha_at = self._places

        def larger(first: Any, values: Any) -> list[Any]:
            """In as many registers as values, slot after slot."""
            return [_larger(builder, *pair) for pair in zip(self._load(first, len(values)), values, strict=True)]

        before = load(builder, most_at)
        maxima = [before] * turns[0][0]
        for number, begin, end in turns:
            most, *others = loop(builder, begin, end, number, maxima, larger)
            for other in others:
                most = _larger(builder, other, most)
            maxima = [most]
        self._shift = builder.fsub(everywhere(0.0), builder.fmul(most, self._factor))
        # Exactly 1 where the largest score stays: a block of slots that a row does not see leaves it as it is.
        self.alpha = exponential(builder, builder.fmul(builder.fsub(before, most), self._factor))
        store(builder, most, most_at)
        store(builder, self.alpha, alpha_at)
        return builder.fmul(load(builder, sum_at), self.alpha)

    def weigh(self, turns: Turns, total: Any, put: Callable[[Any, list[Any]], None]) -> Any:
        """`put(first slot, weights)` takes care of those of a turn; the sum with them, slot after slot."""
        builder, factor, shift = self._builder, self._factor, self._shift
        if self._is_rounded:
            factor, shift = (builder.fmul(x, everywhere(LOG2E)) for x in (factor, shift))
        for number, begin, end in turns:

            def turn(first: Any, values: Any, number: int = number) -> list[Any]:
                (total,) = values
                scores = [fma(builder, x, factor, shift) for x in self._load(first, number)]
                weights = (powers_of_2 if self._is_rounded else exponentials)(builder, scores)
                put(first, weights)
                for weight in weights:
                    total = builder.fadd(total, weight)
                return [total]

            (total,) = loop(builder, begin, end, number, [total], turn)
        return total

    def end(self, total: Any) -> None:
        store(self._builder, total, self._places[1])

    def _load(self, first: Any, number: int) -> list[Any]:
        builder = self._builder
        slots = (builder.add(first, index(i)) for i in range(number))
        return [load(builder, at(builder, self._score, slot, index(LANES))) for slot in slots]


def _emit_output(builder: Any, out: Any, total: Any, rows: Any, channel: Any) -> None:
    """8 channels of a panel, over the sums of weights, to rows; `rows`: where their addresses are."""
    out, total = pointer(builder, out), pointer(builder, total)
    factor = builder.fdiv(everywhere(1.0), load(builder, total))
    channels = [at(builder, out, builder.add(channel, index(i)), index(LANES)) for i in range(OUTPUTS)]
    columns = [builder.fmul(load(builder, place), factor) for place in channels]
    addresses = builder.inttoptr(rows, index(0).type.as_pointer())
    found = [builder.load(builder.gep(addresses, [index(i)])) for i in range(LANES)]
    store_columns(builder, columns, [at(builder, pointer(builder, address), channel) for address in found])


_output = emitted(_emit_output)


@compiled
def locate(addresses: Any, strides: Any, shape: Any, head: int, first: int, row_3R: Any, nowhere: int) -> None:
    """Where rows of a head from `first` on and their outputs are, and how many slots they see. Behind the last row
    come copies of it, whose output goes nowhere."""
    row_R, target_R, seen_R = row_3R[0], row_3R[1], row_3R[2]
    group, num_queries, num_slots, hidden = shape
    num_rows = group * num_queries
    t, g = divmod(first, group)
    for i in range(len(row_R)):
        row_R[i] = addresses[0] + 4 * (head * strides[0] + g * strides[1] + t * strides[2])
        target_R[i] = addresses[1] + 4 * (head * strides[3] + g * strides[4] + t * strides[5])
        seen_R[i] = num_slots - hidden * (num_queries - 1 - t)
        if first + i >= num_rows:
            target_R[i] = nowhere
        elif first + i < num_rows - 1:
            g += 1
            if g == group:
                t, g = t + 1, 0


@compiled
def finish(out: int, state_3R: Any, scale: float, target_R: Any, head_dim: int, lse_R: Any) -> None:
    """Outputs of panels, [panel, channel, 16 rows], to rows, and the log-sum-exp of those that there are."""
    for first in range(0, len(target_R), LANES):
        total, rows = state_3R[1].ctypes.data + 4 * first, target_R.ctypes.data + 8 * first
        for channel in range(0, head_dim, OUTPUTS):
            _output((out + 4 * first * head_dim, total, rows, channel))
    for i in range(len(lse_R)):
        lse_R[i] = state_3R[0, i] * scale + np.log(state_3R[1, i])
