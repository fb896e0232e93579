"""Deny list of invalid copies: lookups skip them for BAD_S seconds.

An invalid copy is deleted where its tier allows. A read-only Redis replica, an account without DEL or a read-only file
system keep it, so lookups do not rely on deletion. Items expire, since the copy may have been repaired.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from kvfold.store.key import Key
from kvfold.store.tiers.base import Clock

BAD_S = 60.0
_MAX_COPIES = 1 << 14


class BadCopies:
    """By tier and key; at most _MAX_COPIES, the oldest are dropped first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until: OrderedDict[tuple[str, Key], float] = OrderedDict()

    def add(self, tier: str, key: Key) -> None:
        with self._lock:
            self._until[tier, key] = self._clock() + BAD_S
            self._until.move_to_end((tier, key))
            if len(self._until) > _MAX_COPIES:
                self._until.popitem(last=False)

    def remove(self, tier: str, key: Key) -> None:
        """The tier has stored a new copy."""
        with self._lock:
            self._until.pop((tier, key), None)

    def has(self, tier: str, key: Key) -> bool:
        with self._lock:
            until = self._until.get((tier, key), 0.0)
            if until <= self._clock():
                self._until.pop((tier, key), None)
                return False
            return True
