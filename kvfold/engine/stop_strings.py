"""Stop strings in a text that grows: each character is looked at once (Knuth-Morris-Pratt), however long both are."""

from __future__ import annotations

from functools import lru_cache


class StopMatcher:
    """`matched`: how many characters at the end of what was added begin the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def add(self, piece: str) -> int | None:
        """How many characters of the piece there are up to where the stop string first ends; None if it does not."""
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
    """The longest end of a text that begins the stop string, and is not all of it."""
    matcher = StopMatcher(stop)
    matcher.add(text[max(0, len(text) - len(stop) + 1) :])
    return matcher.matched


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """Of each beginning of the stop string: the longest shorter beginning that it ends with."""
    found, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        length += stop[length] == character
        found.append(length)
    return tuple(found)
