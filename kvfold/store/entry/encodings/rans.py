"""rANS entropy coding (range asymmetric numeral systems, Duda, arXiv:1311.2540), interleaved over many lanes in numpy.

A lane is a 32-bit state that codes one symbol a step; all lanes share one stream of 16-bit words, which a decoder reads
in the order of steps and, within a step, of lanes. Several streams are decoded side by side, since numpy is fast with
many lanes.

    T steps   L lanes   R rows of a table choice   K tables   S symbols of a table   B streams

The decoder trusts nothing: it reads no word beyond the stream, and at the end every lane must be back in the initial
state and every word used, else the stream is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PRECISION = 14  # bits: the frequencies of a table add up to 1 << PRECISION
_SLOT_MASK = np.uint32((1 << PRECISION) - 1)
_LOW = 1 << 16  # states are at least this
_WORD_BITS = 16

Words = NDArray[np.uint16]
States = NDArray[np.uint32]
Symbols = NDArray[np.uint8]


class InvalidStream(ValueError):
    """Words and states that no encoder has produced."""


class Coded(NamedTuple):
    states_L: States
    words: Words


class TableChoice(NamedTuple):
    """Step t of lane l is coded by table_RL[row_T[t], l]."""

    table_RL: NDArray[np.uint8]
    row_T: NDArray[np.intp]


class Tables:
    """Frequencies of symbols 0 … S-1, at most 256; all above 0, every row adds up to 1 << PRECISION."""

    def __init__(self, frequency_KS: NDArray[np.uint32]) -> None:
        self.num_tables, self.num_symbols = frequency_KS.shape
        self._frequency_KS = frequency_KS
        self.frequency = np.ascontiguousarray(frequency_KS, dtype=np.uint32).reshape(-1)
        before_KS = np.cumsum(frequency_KS, 1, dtype=np.uint32) - frequency_KS
        self.start = before_KS.astype(np.uint32).reshape(-1)

    @cached_property
    def symbol(self) -> Symbols:
        """Symbol of every slot, table after table."""
        symbols = np.arange(self.num_symbols, dtype=np.uint8)
        return np.concatenate([np.repeat(symbols, row) for row in self._frequency_KS])

    def bits_KS(self) -> NDArray[np.float64]:
        """Bits to code each symbol."""
        return PRECISION - np.log2(self._frequency_KS)


def encode(symbols_TL: Symbols, plan: TableChoice, tables: Tables) -> Coded:
    """Codes the last step first, so that decoding begins with the first one."""
    state_L = np.full(symbols_TL.shape[1], _LOW, dtype=np.uint32)
    base_RL = plan.table_RL.astype(np.intp) * tables.num_symbols
    written: list[Words] = []
    for symbol_L, row in zip(symbols_TL[::-1], plan.row_T[::-1], strict=True):
        at_L = base_RL[row] + symbol_L
        frequency_L, start_L = tables.frequency.take(at_L), tables.start.take(at_L)
        full = np.flatnonzero(state_L >> (2 * _WORD_BITS - PRECISION) >= frequency_L)
        written.append(state_L[full].astype(np.uint16))
        state_L[full] >>= _WORD_BITS
        quotient_L = state_L // frequency_L
        state_L = (quotient_L << PRECISION) + (state_L - quotient_L * frequency_L) + start_L
    return Coded(state_L, np.concatenate(written[::-1]))


def decode(streams: Sequence[Coded], plan: TableChoice, tables: Tables) -> Symbols:
    """Symbols [T, L] of streams of equally many lanes, side by side; InvalidStream where one is invalid."""
    state_L = np.concatenate([stream.states_L for stream in streams])
    source = _Words([stream.words for stream in streams])
    slot_base_RL = plan.table_RL.astype(np.intp) << PRECISION
    symbol_base_RL = plan.table_RL.astype(np.intp) * tables.num_symbols
    found_TL = np.empty((len(plan.row_T), len(state_L)), dtype=np.uint8)
    for row, found_L in zip(plan.row_T, found_TL, strict=True):
        slot_L = state_L & _SLOT_MASK
        tables.symbol.take(slot_base_RL[row] + slot_L, out=found_L)
        at_L = symbol_base_RL[row] + found_L
        state_L >>= PRECISION
        state_L *= tables.frequency.take(at_L)
        state_L += slot_L - tables.start.take(at_L)
        low = np.flatnonzero(state_L < _LOW)
        state_L[low] = (state_L[low] << _WORD_BITS) | source.take(low // (len(state_L) // len(streams)))
    if not source.is_used_up or np.any(state_L != _LOW):
        raise InvalidStream("a stream does not end where coding began")
    return found_TL


class _Words:
    """Read positions in the words of several concatenated streams."""

    def __init__(self, streams: Sequence[Words]) -> None:
        lens_B = np.array([len(words) for words in streams], dtype=np.intp)
        self._words = np.concatenate(streams)
        self._end_B = np.cumsum(lens_B)
        self._next_B = self._end_B - lens_B

    def take(self, stream_N: NDArray[np.intp]) -> Words:
        """The next word of each of these streams, in ascending order."""
        count_B = np.bincount(stream_N, minlength=len(self._end_B))
        first_B = self._next_B - np.cumsum(count_B) + count_B
        self._next_B = self._next_B + count_B
        if np.any(self._next_B > self._end_B):
            raise InvalidStream("a stream of words ends early")
        return self._words.take(np.repeat(first_B, count_B) + np.arange(len(stream_N)))

    @property
    def is_used_up(self) -> bool:
        return bool(np.all(self._next_B == self._end_B))


ZERO = 128  # the symbol for 0
_NUM_SYMBOLS = 256
_STARTS = (3.7e-6, 1.45e-4)  # r of the two narrowest tables: standard deviations of 0.2 and 0.24
_NUM_ROOTS = 20  # the square root of r is a Gaussian wider by 2^(1/2)


@cache
def gaussian_tables() -> Tables:
    """Discretized Gaussians around 0, standard deviations from 0.2 to 172 symbols in steps of 2^(1/4). The weight of k
    is r^(k²), by products and square roots only, which IEEE 754 rounds identically on every machine."""
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
