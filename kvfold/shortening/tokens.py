"""Where the tokens of a text begin, so that tokens of any span can be counted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.word_index import NO_SPACES

_PIECE = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]{{1,8}}|[^\w\s]")  # about as many as tokens of a BPE vocabulary
_BLOCK = 100_000  # characters tokenized at once: offsets of megabytes would take gigabytes


@dataclass(frozen=True)
class TokenOffsets:
    """First characters of the tokens of a text, ascending."""

    starts: NDArray[np.int64]

    @classmethod
    def of(cls, text: str, tokenizer: Any = None) -> TokenOffsets:
        """Tokens of a fast tokenizer of transformers; without one, words and marks."""
        if tokenizer is None:
            return cls(np.array([match.start() for match in _PIECE.finditer(text)], dtype=np.int64))
        found = []
        for low, high in blocks(text):
            encoded = tokenizer(text[low:high], add_special_tokens=False, return_offsets_mapping=True)
            found.append(np.array([first for first, _ in encoded["offset_mapping"]], dtype=np.int64) + low)
        return cls(np.concatenate(found) if found else np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts)

    def count(self, start: int, end: int) -> int:
        """Tokens that begin in a span."""
        low, high = np.searchsorted(self.starts, (start, end))
        return int(high - low)


def blocks(text: str) -> list[tuple[int, int]]:
    """Spans of about _BLOCK characters that end with a line, where there is one."""
    found, low = [], 0
    while low < len(text):
        high = min(low + _BLOCK, len(text))
        if high < len(text):
            line_end = text.rfind("\n", low, high) + 1
            high = line_end if line_end > low else high
        found.append((low, high))
        low = high
    return found
