"""In-process index of stored keys, built from store events: which tiers hold a key, and why a key was removed.

It avoids rewriting stored entries, lists snapshot lengths without asking tiers, and gives the reason of a miss. It is a
hint: another process may have stored or deleted entries.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from threading import Lock

from kvfold.store.events import Event, Reason
from kvfold.store.key import Key

_MAX_KEYS = 1 << 16


class KeyIndex:
    """The _MAX_KEYS most recently stored keys, in LRU order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tiers: OrderedDict[Key, set[str]] = OrderedDict()
        self._ttl_s: dict[Key, float] = {}
        self._gone: OrderedDict[Key, Reason] = OrderedDict()
        self._lens: dict[str, set[int]] = defaultdict(set)

    def on_event(self, event: Event) -> None:
        """Subscriber of the store's events."""
        if event.key is None or not event.tier:
            return
        with self._lock:
            if event.kind in ("stored", "promoted"):
                self._add(event.key, event.tier)
            elif event.kind in ("evicted", "quarantined") and event.reason is not None:
                self._remove(event.key, event.tier, event.reason)

    def _add(self, key: Key, tier: str) -> None:
        self._tiers.setdefault(key, set()).add(tier)
        self._tiers.move_to_end(key)
        self._gone.pop(key, None)
        self._lens[key.scope].add(key.end)
        if len(self._tiers) > _MAX_KEYS:
            oldest, _ = self._tiers.popitem(last=False)
            self._ttl_s.pop(oldest, None)

    def _remove(self, key: Key, tier: str, reason: Reason) -> None:
        self._tiers.get(key, set()).discard(tier)
        if not self._tiers.get(key):
            self._tiers.pop(key, None)
            self._ttl_s.pop(key, None)
        self._gone[key] = reason
        if len(self._gone) > _MAX_KEYS:
            self._gone.popitem(last=False)

    def discard(self, keys: Iterable[Key]) -> None:
        """No tier has these keys, or they are unreachable without their parents."""
        with self._lock:
            for key in keys:
                self._tiers.pop(key, None)

    def add(self, tier: str, keys: Iterable[Key]) -> None:
        """A tier listed these keys."""
        with self._lock:
            for key in keys:
                self._add(key, tier)

    def set_ttl(self, key: Key, ttl_s: float) -> None:
        with self._lock:
            self._ttl_s[key] = max(ttl_s, self._ttl_s.get(key, 0.0))

    def has(self, key: Key, ttl_s: float, tiers: Iterable[str]) -> bool:
        """Whether one of these tiers holds it with at least this time to live."""
        with self._lock:
            return not self._tiers.get(key, set()).isdisjoint(tiers) and self._ttl_s.get(key, 0.0) >= ttl_s

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._tiers

    def lens(self, scope: str) -> list[int]:
        """Lengths of stored prefixes of this scope, ascending."""
        with self._lock:
            return sorted(self._lens.get(scope, ()))

    def miss_reason(self, key: Key) -> Reason:
        """Why a key is not stored."""
        with self._lock:
            return self._gone.get(key, "absent")
