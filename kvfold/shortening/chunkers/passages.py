"""`passages`: a few sentences that stand together, for questions whose answer needs the sentence before it."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Unit
from kvfold.shortening.chunkers.grouping import cut_evenly, is_alone, joined, paragraphs, tokens_before
from kvfold.shortening.tokens import TokenOffsets


@register("units", "passages")
@dataclass(frozen=True)
class Passages(Chunker):
    """Consecutive sentences of about `size` tokens, as evenly as paragraphs part; headings and code stand alone."""

    size: int = 128

    def validate(self) -> str | None:
        return None if self.size >= 1 else f"size is at least 1 token, not {self.size}"

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        return passages(text, parts, tokens, self.size)


def passages(text: str, parts: tuple[Unit, ...], tokens: TokenOffsets, size: int) -> tuple[Unit, ...]:
    """Paragraphs, long ones in several units, and short ones that follow each other in one."""
    before = tokens_before(parts, tokens)
    runs: list[tuple[int, int]] = []
    for low, high in paragraphs(text, parts):
        start = runs[-1][0] if runs else low
        fits = before[high] - before[start] <= size // 2 and not is_alone(parts[start]) and not is_alone(parts[low])
        if runs and fits:
            runs[-1] = (start, high)
        else:
            runs.append((low, high))
    return joined(parts, (group for low, high in runs for group in cut_evenly(low, high, before, size)))
