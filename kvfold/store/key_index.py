"""What a process knows of its tiers from their events: who holds which key, and why a key is gone.

It saves work (what is stored already is not written again, lengths of snapshots are known without asking) and answers
"why was this a miss?". It may be behind: another process may have stored or deleted something. Nothing relies on it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from threading import Lock

from kvfold.store.events import Event, Reason
from kvfold.store.key import Key

_MAX_KEYS = 1 << 16


class Known:
    """Of the last keys there was news of."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tiers: OrderedDict[Key, set[str]] = OrderedDict()
        self._ttl_s: dict[Key, float] = {}
        self._gone: OrderedDict[Key, Reason] = OrderedDict()
        self._lens: dict[str, set[int]] = defaultdict(set)

    def note(self, event: Event) -> None:
        """A subscriber."""
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

    def lost(self, keys: Iterable[Key]) -> None:
        """Nobody has these (any more), or nobody can reach them."""
        with self._lock:
            for key in keys:
                self._tiers.pop(key, None)

    def found(self, tier: str, keys: Iterable[Key]) -> None:
        """A tier said that it holds these."""
        with self._lock:
            for key in keys:
                self._add(key, tier)

    def lives(self, key: Key, ttl_s: float) -> None:
        with self._lock:
            self._ttl_s[key] = max(ttl_s, self._ttl_s.get(key, 0.0))

    def has(self, key: Key, ttl_s: float, tiers: Iterable[str]) -> bool:
        """Whether one of these tiers holds it, to live at least so long."""
        with self._lock:
            return not self._tiers.get(key, set()).isdisjoint(tiers) and self._ttl_s.get(key, 0.0) >= ttl_s

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._tiers

    def lens(self, scope: str) -> list[int]:
        """Lengths at which something of this scope was stored, ascending."""
        with self._lock:
            return sorted(self._lens.get(scope, ()))

    def why(self, key: Key) -> Reason:
        """Why it is not there."""
        with self._lock:
            return self._gone.get(key, "absent")
