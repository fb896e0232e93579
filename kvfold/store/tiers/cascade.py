"""Byte tiers one behind the other, fastest first: read through them, write back to all in the background.

A reader gets the first copy there is, also of what still waits to be written; when it turned out good, faster tiers get
one too, in the background. A copy that turned out bad goes from its tier to quarantine, and the next tier is asked;
that one is not asked for it again for a while, also where it could not delete it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import BinaryIO, NamedTuple

from kvfold.store.bad_copies import BadCopies
from kvfold.store.entry.format import Fault, peek
from kvfold.store.events import Event, Events
from kvfold.store.key import Key
from kvfold.store.tiers.background_queue import Writer
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.quarantine import Quarantine


class Copy(NamedTuple):
    """An entry as one tier has it, or, where it `is_pending`, will have it; open to be read."""

    key: Key
    tier: ByteTier
    file: BinaryIO
    is_pending: bool = False


class Cascade:
    def __init__(
        self, tiers: Sequence[ByteTier], events: Events, writer: Writer, quarantine: Quarantine | None, clock: Clock
    ) -> None:
        self.tiers = list(tiers)
        self._events = events
        self._writer = writer
        self._quarantine = quarantine
        self._bad = BadCopies(clock)
        self._pending: dict[Key, tuple[Callable[[], bytes], Lease]] = {}  # what waits to be written

    def get(self, key: Key, at: float) -> Copy | None:
        encode, lease = self._pending.get(key, (None, None))  # before the tiers: it goes when they have it
        for tier in self._asked(key):
            file = tier.get(key, at)
            if file is not None:
                return Copy(key, tier, file)
        if encode is None or lease is None or lease.expires_at <= at:
            return None
        return Copy(key, self.tiers[0], BytesIO(encode()), is_pending=True)

    def _asked(self, key: Key) -> list[ByteTier]:
        """Tiers whose copy has not turned out bad."""
        return [tier for tier in self.tiers if not self._bad.has(tier.name, key)]

    def _put(self, tier: ByteTier, key: Key, data: bytes, lease: Lease) -> bool:
        is_stored = tier.put(key, data, lease)
        if is_stored:
            self._bad.replaced(tier.name, key)
        return is_stored

    def put_later(self, key: Key, num_bytes: int, encode: Callable[[], bytes], lease: Lease) -> bool:
        """Encode and write to every tier, in the background; False if too much waits to be written already."""

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
        is_taken = self._writer.submit(num_bytes, work)
        if not is_taken:
            self._pending.pop(key, None)
            self._events.emit(Event("failed", "", "queue_full", key, key.num_tokens, num_bytes))
        return is_taken

    def promote_later(self, key: Key, source: ByteTier, num_bytes: int, lease: Lease) -> None:
        """Copy a good entry to all faster tiers, where there is time for it."""
        faster = self.tiers[: self.tiers.index(source)]

        def work() -> None:
            file = source.get(key, lease.at)
            if file is None:
                return
            with file:
                data = file.read()
            self._copy(key, data, faster, lease)

        if faster:
            self._writer.submit(num_bytes, work)

    def bring(self, key: Key, at: float, max_bytes: int) -> bool:
        """Have a copy in the fastest tier, unchecked; False if nobody has one, or one that cannot be an entry."""
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

    def slide_later(self, used: Sequence[Copy], keys: Sequence[Key], at: float) -> None:
        """Copies that were not read live longer, too: nobody knows which tier is asked next."""
        read = {(copy.tier.name, copy.key) for copy in used if not copy.is_pending}

        def work() -> None:
            for key in keys:
                for tier in self._asked(key):
                    if (tier.name, key) not in read:
                        tier.slide(key, at)

        self._writer.submit(0, work)

    def delete_later(self, key: Key) -> None:
        def work() -> None:
            for tier in self.tiers:
                tier.delete(key)

        self._writer.submit(0, work)

    def set_aside(self, copy: Copy, fault: Fault) -> None:
        """To quarantine, where there is one, and away; where it cannot be deleted, it is left out of lookups."""
        self._bad.add(copy.tier.name, copy.key)
        file = copy.tier.get(copy.key, 0.0)
        if file is not None and self._quarantine is not None:
            with file, suppress(OSError):
                self._quarantine.keep(copy.key, file.read(self._quarantine.limit_bytes), str(fault))
        self._pending.pop(copy.key, None)
        copy.tier.delete(copy.key)
        copy.tier.emit("quarantined", copy.key, 0, fault.reason)
