"""Placeholder ids: the token ids that stand for the slots of a packed prefix in an engine's prompt.

    ids = 8 marks, the same for every entry | SHAKE-256(entry) as numbers below the vocabulary's size

An engine's own prefix cache keys blocks by token ids. Ids that follow from the entry's hash give every entry blocks of
its own: a second question on it hits, and two documents never share a block, which one padding id for all would do. The
marks tell placeholders from text, so that a prompt which names no entry can be refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

NUM_MARKS = 8
_MARK_BELOW = 64  # ids that every vocabulary has
_MARK_SEED = "kvfold packed prefix"


def placeholder_ids(entry: str, num_slots: int, vocab_size: int) -> list[int]:
    """As many ids as the entry has slots."""
    return [*_numbers(_MARK_SEED, NUM_MARKS, _MARK_BELOW), *_numbers(entry, num_slots - NUM_MARKS, vocab_size)]


def is_marked(token_ids: Sequence[int]) -> bool:
    """Whether a prompt begins as placeholders do."""
    return list(token_ids[:NUM_MARKS]) == _numbers(_MARK_SEED, NUM_MARKS, _MARK_BELOW)


def _numbers(seed: str, count: int, below: int) -> list[int]:
    drawn = np.frombuffer(hashlib.shake_256(seed.encode()).digest(8 * count), "<u8")
    found: list[int] = (drawn % np.uint64(below)).tolist()
    return found
