"""Contract of a storage tier: entries by key, each with a lease; a tier may evict any entry at any time.

A tier does not raise on failure: a failed put stores nothing, a failed get is a miss, and both are events. Byte tiers
(host, disk, Redis) hold entries in the format of `kvfold.store.entry.format`; the device tier holds live sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, ClassVar, Generic, TypeVar

from kvfold.errors import InputError
from kvfold.store.events import Event, Events, Kind, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.eviction import Lease

Put = TypeVar("Put")
Got = TypeVar("Got")
Clock = Callable[[], float]  # seconds since 1970


def check_limit(tier: str, limit_bytes: int) -> None:
    if limit_bytes < 1:
        raise InputError(f"the {tier} tier's limit is {limit_bytes} bytes; give at least 1, or leave the tier out")


class Tier(ABC, Generic[Put, Got]):
    """`name` appears in events; the store sets `events`."""

    name: str
    events: Events
    is_shared: ClassVar[bool] = False  # by other machines: listing all keys is slow

    @abstractmethod
    def put(self, key: Key, value: Put, lease: Lease) -> bool:
        """Store an entry; False if it was not stored."""

    @abstractmethod
    def get(self, key: Key, at: float) -> Got | None:
        """A live entry, or None; refreshes its time to live for a request that started `at`."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Delete an entry if it is there."""

    @abstractmethod
    def keys(self) -> Iterator[Key]:
        """Stored keys, unordered."""

    def close(self) -> None:
        """Close files and connections; by default there are none."""

    def emit(self, kind: Kind, key: Key, num_bytes: int, reason: Reason | None = None) -> None:
        self.events.emit(Event(kind, self.name, reason, key, key.num_tokens, num_bytes))


class ByteTier(Tier[bytes, BinaryIO]):
    """Holds entries as bytes."""

    def touch(self, key: Key, at: float) -> None:
        """Refresh the time to live after a request that started `at` used another tier's copy."""
        file = self.get(key, at)
        if file is not None:
            file.close()

    def has(self, key: Key) -> bool:
        """Whether a live entry is there; its time to live stays as it is."""
        file = self.get(key, 0.0)
        if file is None:
            return False
        file.close()
        return True

    def num_leading(self, keys: Sequence[Key]) -> int:
        """How many of these, from the first one on, are there."""
        return next((number for number, key in enumerate(keys) if not self.has(key)), len(keys))
