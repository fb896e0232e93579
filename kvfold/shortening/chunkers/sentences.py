"""`sentences`: sentences, headings, list items, table rows and code blocks, each a unit."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Unit
from kvfold.shortening.tokens import TokenOffsets


@register("units", "sentences")
@dataclass(frozen=True)
class Sentences(Chunker):
    """Sentences, headings, list items, table rows and code blocks."""

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        return parts
