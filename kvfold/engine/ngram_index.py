"""Where did the last tokens stand before, and what came then? An index over token ids that grows with the text.

Chains of equal pairs, as Lempel-Ziv coders keep them: a table from a pair of tokens to where it ended last, and from
each place to the one before it. A token is added in O(1); a search follows a bounded number of places and compares each
of them backwards, so its cost does not grow with the text. Prompt lookup (Saxena, 2023) scans the prompt instead.

    history   … a b c d e f … x b c d        the last three tokens stood before: match 3, continued by e f …
                      ^ source
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_BREAK = -1  # between texts that do not follow each other; no token has this id
_MOST_PLACES = 16  # compared in one search, the latest first
_LONGEST = 64  # tokens compared at one place


class Match(NamedTuple):
    source: int  # where the continuation begins
    length: int  # tokens before it that equal the end of the history


class Lookup:
    """Token ids in order, and the earlier places of every pair of them."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair: index behind its latest place
        self._before: list[int | None] = []  # by index behind a pair: the same for its place before
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def end_text(self) -> None:
        """What is added next does not follow what was added so far."""
        self.add(_BREAK)

    def add(self, token: int) -> None:
        last = self._tokens[-1] if self._tokens else _BREAK
        self._tokens.append(token)
        if _BREAK in (last, token):
            self._before.append(None)
        else:
            self._before.append(self._latest.get((last, token)))
            self._latest[last, token] = len(self._tokens)

    def find(self) -> Match | None:
        """The earlier place that agrees with the end of the history for longest; of equals, the latest."""
        best: Match | None = None
        place = self._before[-1] if self._before else None
        for _ in range(_MOST_PLACES):
            if place is None:
                break
            length = self._agreement(place)
            if best is None or length > best.length:
                best = Match(place, length)
            place = self._before[place - 1]
        return best

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` equal those at the end."""
        tokens, end, length = self._tokens, len(self._tokens), 2
        most = min(place, _LONGEST)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length] != _BREAK:
            length += 1
        return length

    def continuation(self, source: int, num_tokens: int) -> list[int]:
        """What stood at `source`, up to the end of that text; a copy that reaches the end of the history goes round."""
        found: list[int] = []
        period = len(self._tokens) - source
        for i in range(num_tokens):
            token = self._tokens[source + i] if i < period else found[i - period]
            if token == _BREAK:
                break
            found.append(token)
        return found
