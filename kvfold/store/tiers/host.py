"""Host tier: entries in CPU memory, bounded in bytes."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from threading import Lock
from typing import BinaryIO

from kvfold.store.events import Events, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock, check_limit
from kvfold.store.tiers.eviction import Evictor, Lease


class HostTier(ByteTier):
    """At most `limit_bytes`, at all times."""

    name = "host"

    def __init__(self, limit_bytes: int, *, clock: Clock = time.time) -> None:
        check_limit(self.name, limit_bytes)
        self.events = Events()
        self._clock = clock
        self._lock = Lock()
        self._evictor = Evictor(limit_bytes)
        self._data: dict[Key, bytes] = {}

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(map(len, self._data.values()))

    def put(self, key: Key, value: bytes, lease: Lease) -> bool:
        if len(value) > self._evictor.limit_bytes:
            self.emit("failed", key, len(value), "no_room")
            return False
        with self._lock:
            gone = self._make_room(key, len(value))
            self._data[key] = value
            self._evictor.add(key, len(value), lease)
        for other, size, reason in gone:
            self.emit("evicted", other, size, reason)
        self.emit("stored", key, len(value))
        return True

    def _make_room(self, key: Key, num_bytes: int) -> list[tuple[Key, int, Reason]]:
        self._drop(key)
        gone: list[tuple[Key, int, Reason]] = [
            (other, self._drop(other), "expired") for other in self._evictor.expired(self._clock())
        ]
        return gone + [(other, self._drop(other), "space") for other in self._evictor.victims(num_bytes)]

    def _drop(self, key: Key) -> int:
        self._evictor.remove(key)
        return len(self._data.pop(key, b""))

    def get(self, key: Key, at: float) -> BinaryIO | None:
        with self._lock:
            if self._evictor.is_live(key, self._clock()):
                self._evictor.touch(key, at)
                return io.BytesIO(self._data[key])
            is_expired = key in self._evictor
            size = self._drop(key)
        if is_expired:
            self.emit("evicted", key, size, "expired")
        return None

    def delete(self, key: Key) -> None:
        with self._lock:
            self._drop(key)

    def keys(self) -> Iterator[Key]:
        with self._lock:
            return iter(list(self._evictor))
