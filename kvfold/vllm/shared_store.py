"""The store as both sides of the connector see it: tiers that many processes share, and entries in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvfold.store.entry.format import InvalidEntry
from kvfold.store.events import Events
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.places import open_place
from kvfold.store.tiers.tiered_cache import BackgroundQueue, BadCopies, Copy, Quarantine, TieredCache
from kvfold.vllm.settings import Settings

_QUEUE_BYTES = 2 << 30


class SharedStore:
    """The folder, then Redis. Writes are done by a thread; an entry that fails a check is put aside and deleted."""

    def __init__(self, settings: Settings, secret: bytes) -> None:
        places = [place for place in (settings.store, settings.redis) if place]
        self.secret = secret
        self.ttl_s = settings.ttl_s
        tiers: list[ByteTier] = [open_place(place, settings.disk_bytes) for place in places]
        events = Events()
        for tier in tiers:
            tier.events = events
        self.events = events
        self._queue = BackgroundQueue(_QUEUE_BYTES)
        quarantine = Quarantine(Path(settings.store) / "quarantine") if settings.store else None
        self._bad = BadCopies(time.time)
        self._tiered = TieredCache(tiers, events, self._queue, quarantine, self._bad)
        self._num_told = 0

    def num_leading(self, keys: Sequence[Key]) -> int:
        """How many of these, from the first one on, a tier has."""
        found = 0
        for tier in self._tiered.tiers:
            found += tier.num_leading(keys[found:])
            if found == len(keys):
                break
        return found

    def has(self, key: Key) -> bool:
        return any(tier.has(key) for tier in self._tiered.tiers)

    def open(self, key: Key) -> Copy | None:
        """A copy, to be closed; its time to live starts anew."""
        return self._tiered.get(key, time.time())

    def put(self, key: Key, num_bytes: int, encode: Callable[[Lease], bytes]) -> bool:
        """Later, in the background; False if too much waits already."""
        lease = Lease(time.time(), self.ttl_s, 0.0)
        return self._tiered.put_async(key, num_bytes, lambda: encode(lease), lease)

    def take_failed(self) -> int:
        """Writes that failed since the last call, in a tier or for lack of room in the queue."""
        total = sum(number for name, number in self.events.counters().items() if name.startswith("failed."))
        found, self._num_told = total - self._num_told, total
        return found

    def drop(self, copy: Copy, error: InvalidEntry) -> None:
        """A copy that failed its check; where it could be deleted, another process may write a new one at once."""
        self._tiered.quarantine(copy, error)
        if not copy.tier.has(copy.key):
            self._bad.remove(copy.tier.name, copy.key)

    def close(self) -> None:
        self._queue.close()
        for tier in self._tiered.tiers:
            tier.close()
