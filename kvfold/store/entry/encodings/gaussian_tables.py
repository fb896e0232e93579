"""Frequency tables for the entropy coder: discretized Gaussians around 0 in 40 widths, identical on every machine.

A channel uses the table that codes it in the fewest bits, so no table is stored with the data. Symbols are bytes for
-128 … 127. The weight of k is r^(k²), computed with products and square roots only: IEEE 754 rounds these identically
everywhere, unlike exponentials.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvfold.store.entry.encodings.rans import PRECISION, Tables

ZERO = 128  # the symbol for 0
_NUM_SYMBOLS = 256
_STARTS = (3.7e-6, 1.45e-4)  # r of the two narrowest tables: standard deviations of 0.2 and 0.24
_NUM_ROOTS = 20  # the square root of r is a Gaussian wider by 2^(1/2)


@cache
def gaussian_tables() -> Tables:
    """Standard deviations from 0.2 to 172 symbols in steps of 2^(1/4)."""
    rows, ratios = [], list(_STARTS)
    for _ in range(_NUM_ROOTS):
        rows += [_frequencies(r) for r in ratios]
        ratios = [math.sqrt(r) for r in ratios]
    return Tables(np.stack(rows))


def cheapest_table(symbol_TL: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Per lane, index of the table that codes its symbols in the fewest bits."""
    num_lanes = symbol_TL.shape[1]
    at_TL = symbol_TL + np.arange(num_lanes) * _NUM_SYMBOLS
    count_LS = np.bincount(at_TL.ravel(), minlength=num_lanes * _NUM_SYMBOLS).reshape(num_lanes, _NUM_SYMBOLS)
    found_L: NDArray[np.intp] = (count_LS @ gaussian_tables().bits_KS().T).argmin(1)
    return found_L.astype(np.uint8)


def _frequencies(r: float) -> NDArray[np.uint32]:
    """At least 1 for every symbol; the rounding remainder goes to symbol 0."""
    weights, step = [1.0], r
    for _ in range(ZERO):
        weights.append(weights[-1] * step)
        step *= r * r
    both = weights[:0:-1] + weights[:-1]  # -128 … 127
    total, shared = math.fsum(both), (1 << PRECISION) - len(both)
    found = [1 + math.floor(shared * weight / total) for weight in both]
    found[ZERO] += (1 << PRECISION) - sum(found)
    return np.array(found, dtype=np.uint32)
