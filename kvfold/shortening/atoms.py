"""Atoms of a text: words, each with the white space in front of it, and runs of words that are cut whole or not at all.

Tokens of most vocabularies begin with the white space before a word, so an atom does. Line breaks at the end of a unit
are atoms of their own. Atoms cover the text without gaps.

    |The| oven| costs| 12 euros|.⏎⏎|   "12 euros" is protected

    W words   A atoms   T tokens
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Bools, Task, Unit

Integers = NDArray[np.int64]
Span = tuple[int, int]
_NO_SPACES = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han: no spaces between words
_WORD = re.compile(rf"(?<!\s)\s*+(?:[{_NO_SPACES}]|[^\s{_NO_SPACES}]+)")
_WHOLE = ("code", "heading", "row")  # kinds of units that are never cut in the middle


@dataclass(frozen=True)
class Atoms:
    """First characters of the atoms, ascending, and the end of the text."""

    bounds: Integers  # [A + 1]
    is_break_A: Bools

    @classmethod
    def of(cls, task: Task, protected: Iterable[Span], token_starts_T: Integers) -> Atoms:
        """Words that hold parts of one protected span, or of one token, are one atom."""
        text = task.text
        breaks = [span for unit in task.units if "\n" in text[slice(*(span := _space_behind(text, unit)))]]
        found = {match.start() for match in _WORD.finditer(text)}.union(chain.from_iterable(breaks), (0,))
        starts_W = np.array(sorted(found - {len(text)}), dtype=np.int64)
        words = cls(np.append(starts_W, len(text)), np.isin(starts_W, [start for start, _ in breaks]))
        num_tokens_W = np.diff(np.searchsorted(token_starts_T, words.bounds))
        is_joined_W = (num_tokens_W == 0) & ~words.is_break_A
        is_joined_W[1:] &= ~words.is_break_A[:-1]
        whole = (_stripped(text, unit) for unit in task.units if unit.kind in _WHOLE)
        for low, high in map(words.within, chain(protected, whole)):
            is_joined_W[low + 1 : high] = True
        is_joined_W[:1] = False
        return cls(np.append(starts_W[~is_joined_W], len(text)), words.is_break_A[~is_joined_W])

    def within(self, span: Span) -> Span:
        """The atoms that hold characters of a span, as a range."""
        low, high = np.searchsorted(self.bounds, (span[0], span[1] - 1), side="right")
        return int(low) - 1, int(high)

    def holding(self, spans: Iterable[Span]) -> Bools:
        """[A]: atoms that hold a part of one of the spans."""
        found = np.zeros(len(self.is_break_A), dtype=bool)
        for low, high in map(self.within, spans):
            found[low:high] = True
        return found

    def breaks_beside(self, taken_A: Bools) -> Bools:
        """[A]: line breaks before or behind an atom that is taken."""
        is_beside = np.zeros(len(taken_A), dtype=bool)
        is_beside[:-1] |= taken_A[1:]
        is_beside[1:] |= taken_A[:-1]
        return self.is_break_A & is_beside

    def tokens(self, starts_T: Integers) -> Integers:
        """[A + 1]: the first token that begins in each atom, and the number of tokens."""
        found: Integers = np.searchsorted(starts_T, self.bounds)
        return found

    def units(self, task: Task) -> Integers:
        """[A]: the unit that each atom belongs to, by its first character that is no white space; a break to the one
        before it."""
        text, pairs = task.text, zip(self.bounds[:-1], self.bounds[1:], strict=True)
        firsts = np.array([low + len(text[low:high]) - len(text[low:high].lstrip()) for low, high in pairs])
        firsts = np.where(self.is_break_A, self.bounds[:-1], firsts)
        found: Integers = np.searchsorted([unit.start for unit in task.units], firsts, side="right") - 1
        return found

    def joined(self, text: str, stays_A: Bools) -> tuple[Span, ...]:
        """Spans of atoms that stay, neighbours as one, without white space before the first and one break at a time."""
        stays_A = stays_A.copy()
        order = np.flatnonzero(stays_A)
        is_break = self.is_break_A[order]
        stays_A[order[is_break & np.append(True, is_break[:-1])[: len(order)]]] = False
        edge = np.diff(np.concatenate(([0], stays_A.astype(np.int8), [0])))
        lows, highs = self.bounds[np.flatnonzero(edge == 1)], self.bounds[np.flatnonzero(edge == -1)]
        spans = [(int(low), int(high)) for low, high in zip(lows, highs, strict=True)]
        if spans:
            low, high = spans[0]
            spans[0] = high - len(text[low:high].lstrip()), high
        return tuple(span for span in spans if span[0] < span[1])


def _stripped(text: str, unit: Unit) -> Span:
    inner = text[unit.start : unit.end]
    return unit.start + len(inner) - len(inner.lstrip()), unit.start + len(inner.rstrip())


def _space_behind(text: str, unit: Unit) -> Span:
    return max(unit.start, _stripped(text, unit)[1]), unit.end
