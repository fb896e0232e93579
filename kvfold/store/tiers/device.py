"""Prefixes that are still in the arena: sequences whose sealed segments whoever hits shares by reference.

A held sequence serves its own length by sharing, and, where it keeps everything, each whole chunk before that by a copy
inside the arena. What is held gives way when the arena is short of memory. Used by the one thread that runs the
model: segments and arenas know no locks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvfold.errors import InputError, OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.slots import copy_prefix
from kvfold.store.events import Events, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.base import Clock, Tier
from kvfold.store.tiers.eviction import Lease, Ledger


class DeviceTier(Tier[SequenceCache, SequenceCache]):
    """Holds at most `limit_bytes` of arenas; memory that running sequences share is counted too."""

    name = "device"

    def __init__(self, limit_bytes: int, *, clock: Clock = time.time) -> None:
        if limit_bytes < 1:
            raise InputError(f"the device tier's limit is {limit_bytes} bytes; give at least 1, or leave the tier out")
        self.events = Events()
        self._clock = clock
        self._ledger = Ledger(limit_bytes)
        self._held: dict[Key, SequenceCache] = {}
        self._holder: dict[Key, Key] = {}  # every key that can be served -> the key of the sequence that does it

    @property
    def num_bytes(self) -> int:
        return self._ledger.total_bytes

    @property
    def arena_bytes(self) -> int:
        """What is held, every byte once however many prefixes share it; from any thread."""
        held = list(self._held.values())
        segments = {id(one): one for sequence in held for one in (*sequence.segments, sequence.tail)}
        return sum(one.num_bytes for one in segments.values()) + sum(sequence.block_bytes for sequence in held)

    def put(self, key: Key, value: SequenceCache, lease: Lease) -> bool:
        return self.put_chunks([key], value, lease)

    def put_chunks(self, keys: Sequence[Key], value: SequenceCache, lease: Lease) -> bool:
        """Hold a branch of the sequence, which is as long as the last key says; it can serve all of them."""
        key = keys[-1]
        self._drop(key, None)
        for other in self._ledger.expired(self._clock()):
            self._drop(other, "expired")
        try:
            held = value.fork()
        except OutOfPages:
            self.emit("failed", key, 0, "no_room")
            return False
        if not held.open.fill:
            held.open.release()  # nothing is in it, and branches have their own
        num_bytes = held.resident_bytes
        if num_bytes > self._ledger.limit_bytes:
            held.release()
            self.emit("failed", key, num_bytes, "no_room")
            return False
        for other in self._ledger.victims(num_bytes):
            self._drop(other, "space")
        self._held[key] = held
        self._ledger.add(key, num_bytes, lease)
        self._holder |= dict.fromkeys(keys, key)
        self.emit("stored", key, num_bytes)
        return True

    def get(self, key: Key, at: float) -> SequenceCache | None:
        """A sequence of the caller's own; raises OutOfPages if there is no memory even for what it cannot share."""
        holder = self._holder.get(key)
        if holder is None:
            return None
        if not self._ledger.is_live(holder, self._clock()):
            self._drop(holder, "expired")
            return None
        self._ledger.touch(holder, at)
        held = self._held[holder]
        return held.fork() if key == holder else copy_prefix(held, key.end)

    def serves(self, key: Key, lease: Lease) -> bool:
        """Whether exactly this is held, to live at least as long; it is then used by the lease's request."""
        record = self._ledger.get(key)
        if record is None or record.ttl_s < lease.ttl_s:
            return False
        self._ledger.touch(key, lease.at)
        return True

    def delete(self, key: Key) -> None:
        self._drop(self._holder.get(key, key), None)

    def keys(self) -> Iterator[Key]:
        return iter(list(self._holder))

    def shrink(self) -> bool:
        """Give up the entry that is worth least; False if nothing is held."""
        key = self._ledger.least()
        if key is not None:
            self._drop(key, "space")
        return key is not None

    def close(self) -> None:
        for key in list(self._held):
            self._drop(key, None)

    def _drop(self, key: Key, reason: Reason | None) -> None:
        held, record = self._held.pop(key, None), self._ledger.get(key)
        if held is None or record is None:
            return
        self._ledger.remove(key)
        self._holder = {served: holder for served, holder in self._holder.items() if holder != key}
        held.release()
        if reason is not None:
            self.emit("evicted", key, record.num_bytes, reason)
