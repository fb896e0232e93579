"""A bank of text slots, of which an update rewrites few (after sparse memory finetuning, arXiv:2510.15103).

    score of a slot = accesses / accesses of all * ln((recalls + 1) / (recalls that used it + 1))

An update accesses slots that share words with the new facts, and free ones. Slots that every question uses score low
and stay, however often they are hit; those that only this update touches are rewritten, at most `top` of them. All
others keep every byte, so a KV cache of the rendered bank stays valid up to the first slot that changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvfold.memory.fact import Fact
from kvfold.memory.render import CLOSING, OPENING, fact_line
from kvfold.memory.words import content_words
from kvfold.shortening.base import Floats

FREE_LINE = "-"
_OF_ENDED = 8  # accesses of a slot whose fact ended: it says what no longer holds


@dataclass(frozen=True)
class Slot:
    """A line of the section, and the id of its fact; None: it is free."""

    fact: int | None = None
    line: str = FREE_LINE


def tfidf_scores(accesses: ArrayLike, background: ArrayLike, num_background: int, *, has_idf: bool = True) -> Floats:
    """[N]: which slots an update is about. `background`: recalls that used each slot, of `num_background`."""
    access_N, used_N = np.asarray(accesses, dtype=np.float64), np.asarray(background, dtype=np.float64)
    share_N: Floats = access_N / max(1.0, access_N.sum())
    return share_N * np.log((num_background + 1) / (used_N + 1)) if has_idf else share_N


def updated(
    bank: Sequence[Slot], facts: Sequence[Fact], uses: Mapping[int, int], num_recalls: int, top: int
) -> tuple[Slot, ...]:
    """The bank with new facts in at most `top` slots; facts that find no slot stay out.

    `uses`: recalls that used the facts which slots hold. A fact takes the slot of the one it superseded where that is
    among the best, else a free slot, else the best one left.
    """
    access_N = accesses(bank, facts)
    used_N = [0 if slot.fact is None else min(uses.get(slot.fact, 0), num_recalls) for slot in bank]
    score_N = tfidf_scores(access_N, used_N, num_recalls + 1)  # one more, so that no logarithm is 0
    order = [int(row) for row in np.argsort(-score_N, kind="stable") if access_N[row] > 0][:top]
    return _rewritten(bank, order, facts)


def accesses(bank: Sequence[Slot], facts: Sequence[Fact]) -> list[int]:
    """Words that each slot shares with the new facts; a free slot counts one for each fact."""
    words = [set(content_words(fact.text)) for fact in facts]
    ended = {fact.supersedes for fact in facts} - {None}
    found = []
    for slot in bank:
        own = set(content_words(slot.line))
        shared = sum(len(own & new) for new in words)
        found.append(len(facts) if slot.fact is None else shared + (_OF_ENDED if slot.fact in ended else 0))
    return found


def _rewritten(bank: Sequence[Slot], order: list[int], facts: Sequence[Fact]) -> tuple[Slot, ...]:
    found, left = list(bank), list(order)
    waiting = []
    for fact in facts:
        row = next((row for row in left if fact.supersedes is not None and bank[row].fact == fact.supersedes), None)
        if row is None:
            waiting.append(fact)
        else:
            left.remove(row)
            found[row] = Slot(fact.id, fact_line(fact))
    left.sort(key=lambda row: bank[row].fact is not None)  # free ones first
    for row, fact in zip(left, waiting, strict=False):
        found[row] = Slot(fact.id, fact_line(fact))
    return tuple(found)


def render_bank(bank: Sequence[Slot]) -> str:
    """The section: a line for each slot, free ones too, so that slots keep their places."""
    return "\n".join([OPENING, *(slot.line for slot in bank), CLOSING])


def changed_share(before: Sequence[str], bank: Sequence[Slot]) -> float:
    """Of the slots, those whose line is another one than it was."""
    if len(before) != len(bank):
        return 1.0
    return sum(line != slot.line for line, slot in zip(before, bank, strict=True)) / max(1, len(bank))
