"""The contract of a tier: a place that keeps entries by key, and may lose them at any time.

A tier never raises for what goes wrong in it: an entry that cannot be stored is not stored, one that cannot be read is
not there, and both are events. Byte tiers (host, disk, Redis) hold entries as `kvfold.store.entry.format` writes them;
the device tier holds live sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import BinaryIO, ClassVar, Generic, TypeVar

from kvfold.store.events import Event, Events, Kind, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.eviction import Lease

Put = TypeVar("Put")
Got = TypeVar("Got")
Clock = Callable[[], float]  # seconds since 1970


class Tier(ABC, Generic[Put, Got]):
    """`name` appears in events; a store sets `events` when it takes the tier."""

    name: str
    events: Events
    is_shared: ClassVar[bool] = False  # by other machines, so that asking for everything takes long

    @abstractmethod
    def put(self, key: Key, value: Put, lease: Lease) -> bool:
        """Keep an entry; False if that was not possible."""

    @abstractmethod
    def get(self, key: Key, at: float) -> Got | None:
        """An entry that is there and alive; a request that started `at` uses it, so it lives longer."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Forget an entry, if it is there."""

    @abstractmethod
    def keys(self) -> Iterator[Key]:
        """What is there now, in no order."""

    def close(self) -> None:
        """Let go of files and connections; by default there are none."""

    def emit(self, kind: Kind, key: Key, num_bytes: int, reason: Reason | None = None) -> None:
        self.events.emit(Event(kind, self.name, reason, key, key.num_tokens, num_bytes))


class ByteTier(Tier[bytes, BinaryIO]):
    """Holds entries as bytes."""

    def slide(self, key: Key, at: float) -> None:
        """A request that started `at` used another tier's copy: this one lives longer too."""
        file = self.get(key, at)
        if file is not None:
            file.close()
