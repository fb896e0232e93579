"""Copies that were found bad, left out of lookups for a while.

A bad copy is deleted where its tier lets that happen. A read-only Redis replica, an account without DEL, or a read-only
file system keep it: no lookup may rely on it being gone. What is remembered expires, since somebody may repair it.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from kvfold.store.key import Key
from kvfold.store.tiers.base import Clock

BAD_S = 60.0
_MAX_COPIES = 1 << 14


class BadCopies:
    """By tier and key, for `BAD_S` seconds of the clock; the oldest of too many are forgotten first."""

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

    def replaced(self, tier: str, key: Key) -> None:
        """The tier has taken another copy."""
        with self._lock:
            self._until.pop((tier, key), None)

    def has(self, tier: str, key: Key) -> bool:
        with self._lock:
            until = self._until.get((tier, key), 0.0)
            if until <= self._clock():
                self._until.pop((tier, key), None)
                return False
            return True
