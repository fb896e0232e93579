"""Disk tier: entries as files in a folder, bounded in bytes, crash-safe and persistent.

    entries/SCOPE/D0/START-END-DIGEST.kvp     D0: the first two digits of the digest
    lock                                      locked by the process that uses the folder

An entry is written to a temporary file, synced and renamed, so a named file is complete. Its modification time is its
expiry, which persists over restarts. The eviction state is rebuilt from file names, sizes, times and preambles when the
tier is first used.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from kvfold.atomic_io import TEMPORARY
from kvfold.errors import FileError, KvfoldWarning
from kvfold.store.entry.format import PREAMBLE_BYTES, claims
from kvfold.store.events import Events, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock, check_limit
from kvfold.store.tiers.eviction import Evictor, Lease
from kvfold.store.tiers.folder import holds_lock, lock_folder, set_expiry, write_entry

SUFFIX = ".kvp"


def path_of(folder: Path, key: Key) -> Path:
    return folder / "entries" / key.scope / key.digest[:2] / f"{key.start:x}-{key.end:x}-{key.digest}{SUFFIX}"


def key_of(path: Path) -> Key | None:
    """The key of an entry's file; None for other files, and for files in another entry's folder."""
    key = Key.parse(f"{path.parent.parent.name}-{path.name.removesuffix(SUFFIX)}")
    return key if key is not None and path.name.endswith(SUFFIX) and path.parent.name == key.digest[:2] else None


class DiskTier(ByteTier):
    """At most `limit_bytes` in `folder`, including the file being written. One process uses a folder at a time. If the
    folder is deleted meanwhile, the tier is empty and refuses writes from then on."""

    name = "disk"

    def __init__(self, folder: str | Path, limit_bytes: int, *, clock: Clock = time.time) -> None:
        check_limit(self.name, limit_bytes)
        self.events = Events()
        self.folder = Path(folder)
        self._clock = clock
        self._writing = Lock()  # of the folder, held while an entry is written or deleted; acquired before _lock
        self._lock = Lock()  # of the eviction state, held briefly
        self._evictor = Evictor(limit_bytes)
        self._is_scanned = False
        self._has_warned = False
        self._owned = lock_folder(self.folder, self._entries)

    @property
    def num_bytes(self) -> int:
        """Sum of file sizes."""
        return self._is_ours() and sum(path.stat().st_size for path in self._entries.rglob("*") if path.is_file())

    def put(self, key: Key, value: bytes, lease: Lease) -> bool:
        if len(value) > self._evictor.limit_bytes:
            self.emit("failed", key, len(value), "no_room")
            return False
        if not self._is_ours():
            self.emit("failed", key, len(value), "unavailable")
            return False
        with self._writing:
            try:
                self._make_room(key, len(value))
                with self._lock:
                    self._evictor.add(key, len(value), lease)  # before writing: it counts against the limit
                write_entry(self._path(key), value, lease.expires_at)
            except (OSError, FileError):
                self._delete([key], None)
                self.emit("failed", key, len(value), "unavailable")
                return False
        self.emit("stored", key, len(value))
        return True

    def _make_room(self, key: Key, num_bytes: int) -> None:
        """Delete an older entry of this key, expired entries and victims; OSError if a deletion fails."""
        with self._lock:
            self._scan()
            expired = self._evictor.expired(self._clock())
        are_gone = [self._delete([key], None), self._delete(expired, "expired")]
        with self._lock:
            victims = self._evictor.victims(num_bytes)
        if not all([*are_gone, self._delete(victims, "space")]):
            raise OSError("an entry cannot be deleted")

    def _delete(self, keys: Sequence[Key], reason: Reason | None) -> bool:
        """Delete files, then their records; a file that cannot be deleted keeps its record and its bytes. Returns
        whether all were deleted; without a reason no event is emitted. The caller holds `_writing`."""
        is_done = True
        for key in keys:
            is_gone = self._unlink(key)
            with self._lock:
                record = self._evictor.get(key)
                if is_gone:
                    self._evictor.remove(key)
                elif record is not None:
                    self._evictor.reinsert(key)
            if is_gone and record is not None and reason is not None:
                self.emit("evicted", key, record.num_bytes, reason)
            is_done = is_done and is_gone
        return is_done

    def _unlink(self, key: Key) -> bool:
        """Whether the file no longer exists."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            return not self._path(key).exists()
        return True

    def get(self, key: Key, at: float) -> BinaryIO | None:
        if not self._is_ours():
            return None
        file = self._open(key, at)
        if file is not None:
            return file
        with self._lock:
            counts = key in self._evictor
        if counts:
            with self._writing:  # an entry being written has a record before its file
                file = self._open(key, at)
                if file is None:
                    self._clear(key)
        return file

    def _open(self, key: Key, at: float) -> BinaryIO | None:
        with self._lock:
            self._scan()
            if not self._evictor.is_live(key, self._clock()):
                return None
            expires_at = self._evictor.touch(key, at).expires_at
        try:
            file = self._path(key).open("rb")
        except OSError:
            return None
        with suppress(OSError):  # deleted since, or not writable: the open file is still readable
            set_expiry(self._path(key), expires_at)
        return file

    def _clear(self, key: Key) -> None:
        """Drop an entry that has expired or whose file was deleted; keep one that cannot be opened now."""
        with self._lock:
            is_live = self._evictor.is_live(key, self._clock())
        if not is_live or not self._path(key).exists():
            self._delete([key], None if is_live else "expired")

    def delete(self, key: Key) -> None:
        if self._is_ours():
            with self._writing:
                self._delete([key], None)

    def keys(self) -> Iterator[Key]:
        if not self._is_ours():
            return iter(())
        with self._lock:
            self._scan()
            return iter(list(self._evictor))

    def close(self) -> None:
        self._owned.close()

    def _is_ours(self) -> bool:
        """Whether the folder is still the one that was locked, not one recreated under its name."""
        is_ours = holds_lock(self._owned, self.folder)
        if not is_ours and not self._has_warned:
            self._has_warned = True
            text = f"{self.folder} was deleted or replaced and is no longer used; restart to use it"
            warnings.warn(text, KvfoldWarning, stacklevel=2)
        return is_ours

    # Files

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    def _path(self, key: Key) -> Path:
        return path_of(self.folder, key)

    def _scan(self) -> None:
        """Rebuild the eviction state, once; the caller holds `_lock`."""
        if self._is_scanned:
            return
        self._is_scanned = True
        for path in self._entries.glob("*/*/*"):
            with suppress(OSError):
                self._find(path)

    def _find(self, path: Path) -> None:
        """Add a file's record; delete partial writes of a killed process, and files beyond a lowered limit."""
        key, stat = key_of(path), path.stat()
        too_much = self._evictor.total_bytes + stat.st_size > self._evictor.limit_bytes
        if path.suffix == TEMPORARY or (key is not None and too_much):
            path.unlink()
            return
        if key is None:
            return
        with path.open("rb") as file:
            ttl_s, saved_s = claims(file.read(PREAMBLE_BYTES))  # an unreadable entry is quarantined when it is read
        self._evictor.add(key, stat.st_size, Lease(stat.st_mtime - ttl_s, ttl_s, saved_s))
