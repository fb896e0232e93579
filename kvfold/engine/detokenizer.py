"""Incremental detokenizer, whole characters only, in O(1) per token, and stop-string matching in O(1) per character.

A tokenizer may write a token differently at the start of a text (a leading space goes) and may split a character over
tokens. So new tokens are decoded behind those decoded last, and are withheld while the text ends in an incomplete
character, U+FFFD. Stop strings are matched by Knuth-Morris-Pratt.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any

_HALF = "\ufffd"
_LONGEST = 4  # bytes, and so tokens, of a UTF-8 character


class Detokenizer:
    """`text` grows by whole characters; `ends[i]` is its length after token i, for the tokens it covers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.ends: list[int] = []
        self._ids: list[int] = []
        self._context = 0  # first token decoded as context of the new ones

    def add(self, token: int) -> None:
        self._ids.append(token)
        self._grow(whole=len(self._ids) - len(self.ends) < _LONGEST)

    def finish(self) -> None:
        """No token follows: an incomplete character at the end stays U+FFFD."""
        self._grow(whole=False)

    def tokens_within(self, num_chars: int) -> int:
        """How many tokens end at or before this many characters."""
        return bisect_right(self.ends, num_chars)

    def _grow(self, *, whole: bool) -> None:
        done = len(self.ends)
        before = self._decode(self._ids[self._context : done])
        after = self._decode(self._ids[self._context :])
        if whole and after.endswith(_HALF):
            return
        self.text += after[len(before) :]
        self.ends += [len(self.text)] * (len(self._ids) - done)
        self._context = done

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


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
