"""Events of the prefix store (stored, hit, missed, promoted, evicted, quarantined, failed) and their counters.

Subscribers run in the emitting thread and should return at once; one that raises is unsubscribed with a warning, so
that it cannot fail a request.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
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
