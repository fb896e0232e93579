"""Entries in a folder, bounded in bytes, that survive a restart and a kill at any moment.

    entries/SCOPE/D0/START-END-DIGEST.kvp     D0: the first two digits of the digest
    lock                                      held while a process owns the folder

An entry is written to a temporary name, synced and renamed: a file that has its name is whole. Its modification time is
when it expires, so that outlives a restart too. The ledger is rebuilt from names, sizes, those times and each entry's
first bytes when the tier is first used.
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
from kvfold.errors import FileError, InputError, KvfoldWarning
from kvfold.store.entry.format import PREAMBLE_BYTES, peek
from kvfold.store.events import Events, Reason
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.eviction import Lease, Ledger
from kvfold.store.tiers.folder import own, owns, set_expiry, write_whole

SUFFIX = ".kvp"


def path_of(folder: Path, key: Key) -> Path:
    return folder / "entries" / key.scope / key.digest[:2] / f"{key.start:x}-{key.end:x}-{key.digest}{SUFFIX}"


def key_of(path: Path) -> Key | None:
    """The key of an entry's file; None if it is none, or lies in a place of another."""
    key = Key.parse(f"{path.parent.parent.name}-{path.name.removesuffix(SUFFIX)}")
    return key if key is not None and path.name.endswith(SUFFIX) and path.parent.name == key.digest[:2] else None


class DiskTier(ByteTier):
    """Holds at most `limit_bytes` in `folder`, what is being written included. One process owns a folder at a time. If
    somebody deletes it under its owner, the tier holds nothing from then on and refuses what is new."""

    name = "disk"

    def __init__(self, folder: str | Path, limit_bytes: int, *, clock: Clock = time.time) -> None:
        if limit_bytes < 1:
            raise InputError(f"the disk tier's limit is {limit_bytes} bytes; give at least 1, or leave the tier out")
        self.events = Events()
        self.folder = Path(folder)
        self._clock = clock
        self._writing = Lock()  # of the folder, held while an entry is written or deleted; taken before the other
        self._lock = Lock()  # of the ledger, held for moments
        self._ledger = Ledger(limit_bytes)
        self._is_known = False
        self._has_warned = False
        self._owned = own(self.folder, self._entries)

    @property
    def num_bytes(self) -> int:
        """Counted from the files."""
        return self._is_ours() and sum(path.stat().st_size for path in self._entries.rglob("*") if path.is_file())

    def put(self, key: Key, value: bytes, lease: Lease) -> bool:
        if len(value) > self._ledger.limit_bytes:
            self.emit("failed", key, len(value), "no_room")
            return False
        if not self._is_ours():
            self.emit("failed", key, len(value), "unavailable")
            return False
        with self._writing:
            try:
                self._make_room(key, len(value))
                with self._lock:
                    self._ledger.add(key, len(value), lease)  # before it is there: it takes room from now on
                write_whole(self._path(key), value, lease.expires_at)
            except (OSError, FileError):
                self._delete([key], None)
                self.emit("failed", key, len(value), "unavailable")
                return False
        self.emit("stored", key, len(value))
        return True

    def _make_room(self, key: Key, num_bytes: int) -> None:
        """Delete an older entry of this key, what has expired, and what has to go; OSError if some of it stays."""
        with self._lock:
            self._learn()
            expired = self._ledger.expired(self._clock())
        are_gone = [self._delete([key], None), self._delete(expired, "expired")]
        with self._lock:
            victims = self._ledger.victims(num_bytes)
        if not all([*are_gone, self._delete(victims, "space")]):
            raise OSError("an entry cannot be deleted")

    def _delete(self, keys: Sequence[Key], reason: Reason | None) -> bool:
        """Files, then what is counted of them: one that the folder does not let go of takes room all the same, and its
        entry is kept. Whether all are gone; without a reason nobody is told. The caller holds `_writing`."""
        is_done = True
        for key in keys:
            is_gone = self._unlink(key)
            with self._lock:
                record = self._ledger.get(key)
                if is_gone:
                    self._ledger.remove(key)
                elif record is not None:
                    self._ledger.keep(key)
            if is_gone and record is not None and reason is not None:
                self.emit("evicted", key, record.num_bytes, reason)
            is_done = is_done and is_gone
        return is_done

    def _unlink(self, key: Key) -> bool:
        """Whether there is no such file from now on."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            return not self._path(key).exists()
        return True

    def get(self, key: Key, at: float) -> BinaryIO | None:
        if not self._is_ours():
            return None
        file = self._open(key, at)
        if file is None and self._counts(key):
            with self._writing:  # one that is being written counts before it is there
                file = self._open(key, at)
                if file is None:
                    self._clear(key)
        return file

    def _open(self, key: Key, at: float) -> BinaryIO | None:
        with self._lock:
            self._learn()
            if not self._ledger.is_live(key, self._clock()):
                return None
            expires_at = self._ledger.touch(key, at).expires_at
        try:
            file = self._path(key).open("rb")
        except OSError:
            return None
        with suppress(OSError):  # gone since, or not ours to touch: it is read all the same
            set_expiry(self._path(key), expires_at)
        return file

    def _counts(self, key: Key) -> bool:
        with self._lock:
            return key in self._ledger

    def _clear(self, key: Key) -> None:
        """Of an entry that has expired, or whose file somebody took; one that cannot be opened now is left alone."""
        with self._lock:
            is_live = self._ledger.is_live(key, self._clock())
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
            self._learn()
            return iter(list(self._ledger))

    def close(self) -> None:
        self._owned.close()

    def _is_ours(self) -> bool:
        """Whether the folder is the one that was locked: another may lie in its place, and have another owner."""
        is_ours = owns(self._owned, self.folder)
        if not is_ours and not self._has_warned:
            self._has_warned = True
            text = f"{self.folder} was deleted or replaced and is not used any more; start again to use it"
            warnings.warn(text, KvfoldWarning, stacklevel=2)
        return is_ours

    # What the folder holds

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    def _path(self, key: Key) -> Path:
        return path_of(self.folder, key)

    def _learn(self) -> None:
        """Once; under the lock."""
        if self._is_known:
            return
        self._is_known = True
        for path in self._entries.glob("*/*/*"):
            with suppress(OSError):
                self._find(path)

    def _find(self, path: Path) -> None:
        """Take a file into the ledger; what a kill left half-written goes, and what a lower limit has no room for."""
        key, stat = key_of(path), path.stat()
        too_much = self._ledger.total_bytes + stat.st_size > self._ledger.limit_bytes
        if path.suffix == TEMPORARY or (key is not None and too_much):
            path.unlink()
            return
        if key is None:
            return
        with path.open("rb") as file:
            preamble = peek(file.read(PREAMBLE_BYTES))
        # One that cannot be read is worth nothing, and lives until it is asked for and set aside.
        ttl_s, saved_s = (0, 0.0) if preamble is None else (preamble.ttl_s, preamble.saved_s)
        self._ledger.add(key, stat.st_size, Lease(stat.st_mtime - ttl_s, ttl_s, saved_s))
