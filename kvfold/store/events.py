"""Events of the prefix store (stored, hit, missed, promoted, evicted, quarantined, failed), counters and key index.

Subscribers run in the emitting thread and should return at once; one that raises is unsubscribed with a warning, so
that it cannot fail a request.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from kvfold.errors import KvfoldWarning
from kvfold.store.key import Key

Kind = Literal["stored", "hit", "missed", "promoted", "evicted", "quarantined", "failed"]
# missed: absent … too_short; evicted: expired, space; quarantined: corrupt … unsigned;
# failed (an entry was not stored): unavailable, no_room, queue_full
Reason = Literal[
    "absent", "expired", "space", "too_short", "no_memory",
    "corrupt", "truncated", "foreign", "swapped", "unsigned",
    "unavailable", "no_room", "queue_full",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """`tier` is empty where no tier is involved, as in a miss."""

    kind: Kind
    tier: str = ""
    reason: Reason | None = None
    key: Key | None = None
    num_tokens: int = 0
    num_bytes: int = 0


Subscriber = Callable[[Event], None]


class Events:
    """Subscribers and counters of one store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._subscribers: list[Subscriber] = []
        self._counts: Counter[str] = Counter()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Returns a function that unsubscribes."""
        with self._lock:
            self._subscribers.append(subscriber)
        return lambda: self._unsubscribe(subscriber)

    def emit(self, event: Event) -> None:
        with self._lock:
            name = ".".join(part for part in (event.kind, event.tier, event.reason) if part)
            self._counts[name] += 1
            self._counts[f"{event.kind}_tokens"] += event.num_tokens
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            self._tell(subscriber, event)

    def counters(self) -> dict[str, int]:
        """Events by "kind.tier.reason" (without absent parts), and tokens by "kind_tokens"."""
        with self._lock:
            return {name: count for name, count in sorted(self._counts.items()) if count}

    def _tell(self, subscriber: Subscriber, event: Event) -> None:
        try:
            subscriber(event)
        except Exception as error:
            self._unsubscribe(subscriber)
            warnings.warn(f"a subscriber to store events failed and is dropped: {error!r}", KvfoldWarning, stacklevel=2)

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        with self._lock:
            self._subscribers = [other for other in self._subscribers if other is not subscriber]


_MAX_KEYS = 1 << 16


class KeyIndex:
    """The _MAX_KEYS most recently stored keys, in LRU order: which tiers hold a key, and why a key was removed. A hint:
    another process may have stored or deleted entries."""

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
