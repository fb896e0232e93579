"""Text of tokens that arrive one by one: whole characters only, without decoding everything again.

A tokenizer may write a token differently at the start of a text (a leading space goes) and may split a character over
tokens. So new tokens are decoded behind the ones that were decoded last, and wait while the text ends in half a
character, which is U+FFFD.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

_HALF = "\ufffd"
_LONGEST = 4  # bytes, and so tokens, of a UTF-8 character


class TextStream:
    """`text` grows by whole characters; `ends[i]` is its length after token i, for the tokens it covers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.ends: list[int] = []
        self._ids: list[int] = []
        self._context = 0  # first token that is decoded for what stands before the new ones

    def add(self, token: int) -> None:
        self._ids.append(token)
        self._grow(whole=len(self._ids) - len(self.ends) < _LONGEST)

    def finish(self) -> None:
        """No token follows: what is half a character now stays so."""
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
