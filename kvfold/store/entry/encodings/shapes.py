"""Tables for the entropy coder: normal shapes around 0 in many widths, the same on every machine.

A channel picks the one that codes it in the fewest bits, so that no table travels with the data. Symbols are bytes that
stand for -128 … 127. The weight of k is r^(k²), by products and square roots of doubles alone: they are exact roundings
everywhere, as exponentials are not.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvfold.store.entry.encodings.rans import PRECISION, Tables

ZERO = 128  # the symbol that stands for 0
_NUM_SYMBOLS = 256
_STARTS = (3.7e-6, 1.45e-4)  # r of the two narrowest shapes: standard deviations of 0.2 and 0.24
_NUM_ROOTS = 20  # the square root of r is a shape wider by 2^(1/2)


@cache
def shapes() -> Tables:
    """Standard deviations from 0.2 to 172 symbols, wider by 2^(1/4) each."""
    rows, ratios = [], list(_STARTS)
    for _ in range(_NUM_ROOTS):
        rows += [_frequencies(r) for r in ratios]
        ratios = [math.sqrt(r) for r in ratios]
    return Tables(np.stack(rows))


def cheapest(symbol_TL: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Of every lane, the number of the shape that codes its symbols in the fewest bits."""
    num_lanes = symbol_TL.shape[1]
    at_TL = symbol_TL + np.arange(num_lanes) * _NUM_SYMBOLS
    count_LS = np.bincount(at_TL.ravel(), minlength=num_lanes * _NUM_SYMBOLS).reshape(num_lanes, _NUM_SYMBOLS)
    found_L: NDArray[np.intp] = (count_LS @ shapes().bits_KS().T).argmin(1)
    return found_L.astype(np.uint8)


def _frequencies(r: float) -> NDArray[np.uint32]:
    """At least 1 for every symbol; what rounding leaves goes to 0."""
    weights, step = [1.0], r
    for _ in range(ZERO):
        weights.append(weights[-1] * step)
        step *= r * r
    both = weights[:0:-1] + weights[:-1]  # -128 … 127
    total, shared = math.fsum(both), (1 << PRECISION) - len(both)
    found = [1 + math.floor(shared * weight / total) for weight in both]
    found[ZERO] += (1 << PRECISION) - sum(found)
    return np.array(found, dtype=np.uint32)
