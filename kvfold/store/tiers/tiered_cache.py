"""Tiered cache over byte tiers, fastest first: reads go through the tiers, writes go to all of them in the background.

A read returns the first copy, also of an entry still in the write queue; valid copies are promoted to faster tiers in
the background. An invalid copy is quarantined, deleted and skipped for a while, and the next tier is read. A read-only
Redis replica, an account without DEL or a read-only file system keep it, so lookups do not rely on deletion.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from threading import Condition, Lock, Thread, get_native_id
from typing import BinaryIO, NamedTuple

from kvfold.errors import KvfoldWarning
from kvfold.store.entry.format import InvalidEntry, peek
from kvfold.store.events import Event, Events
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.eviction import Lease

LIMIT_BYTES = 256 << 20


class Quarantine:
    """The newest `limit_bytes`: KEY.kvp has an entry's bytes, KEY.txt the reason."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self._lock = Lock()

    def keep(self, key: Key, data: bytes, why: str) -> None:
        """Never raises: an entry that cannot be written is dropped."""
        with self._lock, suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            note = f"{why}\n".encode()
            self._make_room(len(data) + len(note))
            (self.folder / f"{key.text}.txt").write_bytes(note)
            if len(data) + len(note) <= self.limit_bytes:
                (self.folder / f"{key.text}.kvp").write_bytes(data)

    def _make_room(self, num_bytes: int) -> None:
        files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total + num_bytes <= self.limit_bytes:
                return
            total -= path.stat().st_size
            path.unlink()


BAD_S = 60.0
_MAX_COPIES = 1 << 14


class BadCopies:
    """Deny list by tier and key; at most _MAX_COPIES, the oldest are dropped first. Items expire after BAD_S seconds,
    since the copy may have been repaired."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until: OrderedDict[tuple[str, Key], float] = OrderedDict()

    def add(self, tier: str, key: Key) -> None:
        with self._lock:
            self._until[tier, key] = self._clock() + BAD_S
            self._until.move_to_end((tier, key))
            if len(self._until) > _MAX_COPIES:
                self._until.popitem(last=False)

    def remove(self, tier: str, key: Key) -> None:
        """The tier has stored a new copy."""
        with self._lock:
            self._until.pop((tier, key), None)

    def has(self, tier: str, key: Key) -> bool:
        with self._lock:
            until = self._until.get((tier, key), 0.0)
            if until <= self._clock():
                self._until.pop((tier, key), None)
                return False
            return True


Job = Callable[[], None]


def _lower_priority() -> None:
    """Of this thread, to a tenth of the others' share; Linux alone has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)


class BackgroundQueue:
    """Runs jobs in FIFO order, in one thread; jobs that do not fit are dropped, never waited for. `yields`: other
    threads are given the processors first."""

    def __init__(self, limit_bytes: int, *, yields: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self._yields = yields
        self._jobs: deque[tuple[int, Job]] = deque()
        self._pending_bytes = 0  # queued and running
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def submit(self, num_bytes: int, job: Job) -> bool:
        """False if the queue is full (an empty queue takes a job of any size) or closed."""
        with self._changed:
            full = self._pending_bytes > 0 and self._pending_bytes + num_bytes > self.limit_bytes
            if full or self._is_closed:
                return False
            self._jobs.append((num_bytes, job))
            self._pending_bytes += max(1, num_bytes)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="kvfold-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def close(self) -> None:
        """Run queued jobs, then end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._yields:
            _lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                num_bytes, job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # the thread has to go on
                warnings.warn(f"background work of the store failed: {error!r}", KvfoldWarning, stacklevel=1)
            finally:
                with self._changed:
                    self._pending_bytes -= max(1, num_bytes)
                    self._changed.notify_all()


class Copy(NamedTuple):
    """An open copy of an entry in one tier; `is_pending`: still in the write queue."""

    key: Key
    tier: ByteTier
    file: BinaryIO
    is_pending: bool = False


@dataclass
class TieredCache:
    tiers: list[ByteTier]
    _events: Events
    _write_queue: BackgroundQueue
    _quarantine: Quarantine | None
    _bad: BadCopies
    _pending: dict[Key, tuple[Callable[[], bytes], Lease]] = field(default_factory=dict)  # in the write queue

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
