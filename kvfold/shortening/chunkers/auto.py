"""`auto`: the units that suit a selector."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Selector
from kvfold.shortening.chunkers.passages import Passages
from kvfold.shortening.chunkers.sentences import Sentences

_LEAST = 4  # passages, for a choice among them


@register("units", "auto")
@dataclass(frozen=True)
class Auto(Sentences):
    """Passages for plain `rank` where four may stay, since an answer needs sentences around it; otherwise sentences."""

    def suiting(self, selector: Selector, target: int) -> Chunker:
        found = Passages()
        return found if selector.takes_passages and target >= _LEAST * found.size else Sentences()
