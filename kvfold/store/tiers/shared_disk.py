"""Disk tier for several processes at once: the files of `DiskTier`, without state in memory that could go stale.

Every question is asked of the file system: a file that is there and has not expired is an entry, for all processes.
Entries are written to a temporary name, synced and renamed; two writers of one key write the same content. A process
that writes scans the folder at its first write, then after every `_SCAN_EVERY` writes and when it would exceed the
limit, and deletes what expires first until a tenth of the limit is free; so the limit can be exceeded by what all
processes write between two scans.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvfold.atomic_io import TEMPORARY
from kvfold.errors import FileError
from kvfold.store.entry.format import PREAMBLE_BYTES, claims
from kvfold.store.events import Events
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock, check_limit
from kvfold.store.tiers.disk import key_of, path_of
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.folder import holds_lock, lock_folder, set_expiry, write_entry

_SCAN_EVERY = 32  # writes
_ABANDONED_S = 3600.0  # age of a temporary file whose writer was killed


class _Found(NamedTuple):
    expires_at: float
    num_bytes: int
    path: Path


class SharedDiskTier(ByteTier):
    """About `limit_bytes` in `folder` (None: no limit). Never beside a `DiskTier` that has the folder alone."""

    name = "disk"

    def __init__(self, folder: str | Path, limit_bytes: int | None = None, *, clock: Clock = time.time) -> None:
        if limit_bytes is not None:
            check_limit(self.name, limit_bytes)
        self.events = Events()
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._held_bytes = 0  # at the last scan, and what this process has written since
        self._writes = 0
        self._owned = lock_folder(self.folder, self.folder / "entries", shared=True)

    def put(self, key: Key, value: bytes, lease: Lease) -> bool:
        if self.limit_bytes is not None and len(value) > self.limit_bytes:
            self.emit("failed", key, len(value), "no_room")
            return False
        try:
            self._make_room(len(value))
            if not holds_lock(self._owned, self.folder):
                raise FileError(f"{self.folder} was deleted or replaced; restart to use it again")
            write_entry(path_of(self.folder, key), value, lease.expires_at)
        except (OSError, FileError):
            self.emit("failed", key, len(value), "unavailable")
            return False
        self._held_bytes += len(value)
        self.emit("stored", key, len(value))
        return True

    def get(self, key: Key, at: float) -> BinaryIO | None:
        path = path_of(self.folder, key)
        try:
            file = path.open("rb")
        except OSError:
            return None
        expires_at = os.fstat(file.fileno()).st_mtime
        if expires_at <= self._clock():
            file.close()
            return None
        ttl_s, _ = claims(file.read(PREAMBLE_BYTES))
        file.seek(0)
        if at + ttl_s > expires_at:
            with suppress(OSError):  # deleted since, or not writable: the open file is still readable
                set_expiry(path, at + ttl_s)
        return file

    def has(self, key: Key) -> bool:
        try:
            return path_of(self.folder, key).stat().st_mtime > self._clock()
        except OSError:
            return False

    def delete(self, key: Key) -> None:
        with suppress(OSError):
            path_of(self.folder, key).unlink(missing_ok=True)

    def keys(self) -> Iterator[Key]:
        found = (key_of(path) for path in (self.folder / "entries").glob("*/*/*"))
        return (key for key in found if key is not None)

    def close(self) -> None:
        self._owned.close()

    def _make_room(self, num_bytes: int) -> None:
        if self.limit_bytes is None:
            return
        is_full = self._held_bytes + num_bytes > self.limit_bytes
        if is_full or self._writes % _SCAN_EVERY == 0:
            files = sorted(self._scan())
            self._held_bytes = sum(file.num_bytes for file in files)
            most = self.limit_bytes - num_bytes
            if self._held_bytes > most:
                self._evict(files, min(most, self.limit_bytes * 9 // 10))
        self._writes += 1

    def _evict(self, files: list[_Found], most_bytes: int) -> None:
        for file in files:
            if self._held_bytes <= most_bytes:
                return
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                self._held_bytes -= file.num_bytes
                key = key_of(file.path)
                if key is not None:
                    self.emit("evicted", key, file.num_bytes, "space")

    def _scan(self) -> Iterator[_Found]:
        """All entries; temporary files of killed writers are deleted."""
        for path in (self.folder / "entries").glob("*/*/*"):
            with suppress(OSError):
                stat = path.stat()
                if path.suffix == TEMPORARY and stat.st_ctime < time.time() - _ABANDONED_S:
                    path.unlink()
                elif key_of(path) is not None:
                    yield _Found(stat.st_mtime, stat.st_size, path)
