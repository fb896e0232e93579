"""Tiered cache over byte tiers, fastest first: reads go through the tiers, writes go to all of them in the background.

A read returns the first copy, also of an entry still in the write queue; valid copies are promoted to faster tiers in
the background. An invalid copy is quarantined, deleted and skipped for a while, and the next tier is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import BinaryIO, NamedTuple

from kvfold.store.bad_copies import BadCopies
from kvfold.store.entry.format import InvalidEntry, peek
from kvfold.store.events import Event, Events
from kvfold.store.key import Key
from kvfold.store.tiers.background_queue import BackgroundQueue
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.quarantine import Quarantine


class Copy(NamedTuple):
    """An open copy of an entry in one tier; `is_pending`: still in the write queue."""

    key: Key
    tier: ByteTier
    file: BinaryIO
    is_pending: bool = False


class TieredCache:
    def __init__(
        self,
        tiers: Sequence[ByteTier],
        events: Events,
        queue: BackgroundQueue,
        quarantine: Quarantine | None,
        clock: Clock,
    ) -> None:
        self.tiers = list(tiers)
        self._events = events
        self._write_queue = queue
        self._quarantine = quarantine
        self._bad = BadCopies(clock)
        self._pending: dict[Key, tuple[Callable[[], bytes], Lease]] = {}  # in the write queue

    def get(self, key: Key, at: float) -> Copy | None:
        encode, lease = self._pending.get(key, (None, None))  # read before the tiers: removed once they have it
        for tier in self._tiers_for(key):
            file = tier.get(key, at)
            if file is not None:
                return Copy(key, tier, file)
        if encode is None or lease is None or lease.expires_at <= at:
            return None
        return Copy(key, self.tiers[0], BytesIO(encode()), is_pending=True)

    def _tiers_for(self, key: Key) -> list[ByteTier]:
        """Tiers without a known invalid copy."""
        return [tier for tier in self.tiers if not self._bad.has(tier.name, key)]

    def _put(self, tier: ByteTier, key: Key, data: bytes, lease: Lease) -> bool:
        is_stored = tier.put(key, data, lease)
        if is_stored:
            self._bad.remove(tier.name, key)
        return is_stored

    def put_async(self, key: Key, num_bytes: int, encode: Callable[[], bytes], lease: Lease) -> bool:
        """Encode and write to every tier in the background; False if the write queue is full."""

        def work() -> None:
            try:
                data = encode()
                for tier in self.tiers:
                    self._put(tier, key, data, lease)
            finally:
                self._pending.pop(key, None)

        if not self.tiers:
            return False
        self._pending[key] = encode, lease
        is_taken = self._write_queue.submit(num_bytes, work)
        if not is_taken:
            self._pending.pop(key, None)
            self._events.emit(Event("failed", "", "queue_full", key, key.num_tokens, num_bytes))
        return is_taken

    def promote_async(self, key: Key, source: ByteTier, num_bytes: int, lease: Lease) -> None:
        """Copy a valid entry to all faster tiers, unless the write queue is full."""
        faster = self.tiers[: self.tiers.index(source)]

        def work() -> None:
            file = source.get(key, lease.at)
            if file is None:
                return
            with file:
                data = file.read()
            self._copy(key, data, faster, lease)

        if faster:
            self._write_queue.submit(num_bytes, work)

    def prefetch(self, key: Key, at: float, max_bytes: int) -> bool:
        """Copy an entry, unchecked, to the fastest tier; False if no tier has one with a valid preamble."""
        copy = self.get(key, at)
        if copy is None:
            return False
        index = self.tiers.index(copy.tier)
        with copy.file as file:
            data = file.read(max_bytes + 1) if index else b""
        preamble = peek(data) if len(data) <= max_bytes else None
        if preamble is not None:
            self._copy(key, data, self.tiers[:index], Lease(at, preamble.ttl_s, preamble.saved_s))
        return preamble is not None or not index

    def _copy(self, key: Key, data: bytes, tiers: Sequence[ByteTier], lease: Lease) -> None:
        for tier in tiers:
            if self._put(tier, key, data, lease):
                tier.emit("promoted", key, len(data))

    def touch_async(self, used: Sequence[Copy], keys: Sequence[Key], at: float) -> None:
        """Refresh the time to live of the copies that were not read, in all tiers."""
        read = {(copy.tier.name, copy.key) for copy in used if not copy.is_pending}

        def work() -> None:
            for key in keys:
                for tier in self._tiers_for(key):
                    if (tier.name, key) not in read:
                        tier.touch(key, at)

        self._write_queue.submit(0, work)

    def delete_async(self, key: Key) -> None:
        def work() -> None:
            for tier in self.tiers:
                tier.delete(key)

        self._write_queue.submit(0, work)

    def quarantine(self, copy: Copy, error: InvalidEntry) -> None:
        """Move an invalid copy to quarantine; lookups skip it for a while, in case it cannot be deleted."""
        self._bad.add(copy.tier.name, copy.key)
        file = copy.tier.get(copy.key, 0.0)
        if file is not None and self._quarantine is not None:
            with file, suppress(OSError):
                self._quarantine.keep(copy.key, file.read(self._quarantine.limit_bytes), str(error))
        self._pending.pop(copy.key, None)
        copy.tier.delete(copy.key)
        copy.tier.emit("quarantined", copy.key, 0, error.reason)
