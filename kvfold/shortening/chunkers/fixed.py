"""`fixed`: as many tokens in every unit, whatever they say, each with the end of the one before."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Unit
from kvfold.shortening.tokens import TokenOffsets


@register("units", "fixed")
@dataclass(frozen=True)
class Fixed(Chunker):
    """`size` tokens in every unit; the last `overlap` of each are also the first of the next."""

    size: int = 1000
    overlap: float = 0.15

    def validate(self) -> str | None:
        if self.size < 1:
            return f"size is at least 1 token, not {self.size}"
        return None if 0 <= self.overlap < 1 else f"overlap is a share from 0 to below 1, not {self.overlap:g}"

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        if not text:
            return ()
        step = max(1, self.size - round(self.size * self.overlap))
        num_units = 1 + max(0, -(-(len(tokens) - self.size) // step))
        starts = [0, *(int(tokens.starts[number * step]) for number in range(1, num_units))]
        ends = [*(int(tokens.starts[number * step + self.size]) for number in range(num_units - 1)), len(text)]
        spans = dict(zip(starts, ends, strict=True))  # tokens of one character begin together
        return tuple(Unit(start, end, "chunk") for start, end in spans.items() if start < end)
