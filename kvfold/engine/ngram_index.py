"""N-gram index for prompt-lookup drafts: earlier occurrences of the last tokens of a growing text.

Hash chains over bigrams, as in Lempel-Ziv coders: a table from a bigram to its latest occurrence, and from each
occurrence to the one before it. Adding a token is O(1); a search compares at most 16 occurrences backwards, so its cost
does not grow with the text. Prompt lookup (Saxena, 2023) scans the whole prompt instead.

    history   … a b c d e f … x b c d        the last three tokens occurred before: match 3, continued by e f …
                      ^ source
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_BREAK = -1  # between texts that do not follow each other; no token has this id
_MAX_COMPARED = 16  # occurrences in one search, the latest first
_MAX_MATCH = 64  # tokens compared at one occurrence


class Match(NamedTuple):
    source: int  # where the continuation begins
    length: int  # tokens before it that equal the end of the history


class NgramIndex:
    """Token ids in order, and the chain of earlier occurrences of each bigram."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # bigram: index behind its latest occurrence
        self._before: list[int | None] = []  # by index behind a bigram: the occurrence before it
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def end_text(self) -> None:
        """Tokens added next belong to another text: no match or continuation crosses this point."""
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
        """The longest match of the end of the history; of equal lengths, the latest."""
        best: Match | None = None
        place = self._before[-1] if self._before else None
        for _ in range(_MAX_COMPARED):
            if place is None:
                break
            length = self._match_len(place)
            if best is None or length > best.length:
                best = Match(place, length)
            place = self._before[place - 1]
        return best

    def _match_len(self, place: int) -> int:
        """How many tokens before `place` equal those at the end of the history."""
        tokens, end, length = self._tokens, len(self._tokens), 2
        most = min(place, _MAX_MATCH)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length] != _BREAK:
            length += 1
        return length

    def continuation(self, source: int, num_tokens: int) -> list[int]:
        """The tokens from `source` on, up to the end of that text; past the end of the history they repeat."""
        found: list[int] = []
        period = len(self._tokens) - source
        for i in range(num_tokens):
            token = self._tokens[source + i] if i < period else found[i - period]
            if token == _BREAK:
                break
            found.append(token)
        return found
