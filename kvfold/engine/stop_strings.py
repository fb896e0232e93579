"""Incremental stop-string matching (Knuth-Morris-Pratt): amortised O(1) per character."""

from __future__ import annotations

from functools import lru_cache


class StopMatcher:
    """`matched`: length of the longest suffix of the text that is a proper prefix of the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def add(self, piece: str) -> int | None:
        """Index in the piece behind the first occurrence of the stop string; None if there is none."""
        for index, character in enumerate(piece):
            while self.matched and self.stop[self.matched] != character:
                self.matched = self._borders[self.matched - 1]
            if self.stop[self.matched] == character:
                self.matched += 1
            if self.matched == len(self.stop):
                self.matched = self._borders[-1]
                return index + 1
        return None


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the stop string."""
    matcher = StopMatcher(stop)
    matcher.add(text[max(0, len(text) - len(stop) + 1) :])
    return matcher.matched


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """The failure function: for each prefix, its longest proper prefix that is also its suffix."""
    found, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        length += stop[length] == character
        found.append(length)
    return tuple(found)
