"""`fixed`: as many tokens in every unit, whatever they say, each with the end of the one before.

Units begin and end at white space, so that no two halves of words meet in the shortened text.

    P places where a unit may begin
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Unit
from kvfold.shortening.tokens import TokenOffsets
from kvfold.shortening.word_index import NO_SPACES

_WORD = re.compile(rf"[{NO_SPACES}]|[^\s{NO_SPACES}]+")
_MAX_CHARS = 200  # of a word; a longer run without white space is cut between tokens


@register("units", "fixed", revision=2)
@dataclass(frozen=True)
class Fixed(Chunker):
    """`size` tokens in every unit, fewer where a word would be cut; the last `overlap` also begin the next one."""

    size: int = 1000
    overlap: float = 0.15

    def validate(self) -> str | None:
        if self.size < 1:
            return f"size is at least 1 token, not {self.size}"
        return None if 0 <= self.overlap < 1 else f"overlap is a share from 0 to below 1, not {self.overlap:g}"

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        if not text:
            return ()
        places_P = np.array([*dict.fromkeys([0, *_words(text, tokens), len(text)])])
        before_P = np.searchsorted(tokens.starts, places_P)
        last_P = np.searchsorted(before_P, before_P + self.size, side="right") - 1
        last_P = np.maximum(last_P, np.minimum(np.arange(len(places_P)) + 1, len(places_P) - 1))
        overlap, low, found = round(self.size * self.overlap), 0, list[Unit]()
        while low < len(places_P) - 1:
            high = int(last_P[low])
            found.append(Unit(int(places_P[low]), int(places_P[high]), "chunk"))
            again = max(low + 1, int(np.searchsorted(before_P, before_P[high] - overlap)))
            farther = int(np.searchsorted(last_P, high, side="right"))  # the first that ends behind this one
            low = min(high, max(again, farther))
        return tuple(found)


def _words(text: str, tokens: TokenOffsets) -> Iterator[int]:
    """Where words behind the first begin, and tokens inside of words that are too long."""
    for number, match in enumerate(_WORD.finditer(text)):
        start, end = match.span()
        if number:
            yield start
        if end - start > _MAX_CHARS:
            low, high = np.searchsorted(tokens.starts, (start + 1, end))
            yield from tokens.starts[low:high].tolist()
