"""Read-only inspection of a prefix store's folder or Redis server (`kvfold cache`): list, check, delete entries.

Reading needs no lock and refreshes no time to live, so an operator can look while a server uses the folder; entries
deleted meanwhile are skipped. Deleting locks the folder.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from kvfold.errors import FileError, InputError
from kvfold.store.entry.format import PREAMBLE_BYTES, EntryReader, InvalidEntry, claims
from kvfold.store.key import Key
from kvfold.store.tiers.disk import SUFFIX, key_of, path_of
from kvfold.store.tiers.folder import is_locked, lock_folder
from kvfold.store.tiers.redis import RedisTier
from kvfold.store.tiers.tiered_cache import Quarantine


@dataclass(frozen=True)
class EntryInfo:
    """Metadata of an entry; `ttl_s` and `saved_s` are from its unchecked preamble."""

    key: Key
    tier: str
    num_bytes: int
    expires_at: float
    ttl_s: int
    saved_s: float


class StoreInspector(ABC):
    """`name`: disk or redis. `secret`: the servers' signing secret."""

    name: str
    secret: bytes

    @abstractmethod
    def find(self) -> Iterator[EntryInfo]:
        """Entries, unordered."""

    @abstractmethod
    def open(self, key: Key) -> BinaryIO | None:
        """The bytes of an entry, or None."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Delete an entry; FileError if another process has the lock, or deletion is refused."""

    @property
    def is_in_use(self) -> bool:
        """Whether another process holds the folder's lock."""
        return False

    @abstractmethod
    def lock(self) -> None:
        """Lock for changes until `close`; FileError if another process holds the lock."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock and connections."""

    def quarantine(self, key: Key, quarantine: Quarantine, error: InvalidEntry) -> None:
        """Move an invalid entry to quarantine."""
        file = self.open(key)
        if file is not None:
            with file:
                quarantine.keep(key, file.read(quarantine.limit_bytes), str(error))
        self.delete(key)

    def check(self, key: Key) -> InvalidEntry | None:
        """Read and check a whole entry; None if it is valid or no longer there."""
        file = self.open(key)
        if file is None:
            return None
        with file:
            try:
                for _ in EntryReader(file, key, None, secret=self.secret).blocks():
                    pass
            except InvalidEntry as error:
                return error
        return None

    def facts(self, key: Key) -> dict[str, object] | None:
        """An entry's binding; None if it cannot be read."""
        file = self.open(key)
        if file is None:
            return None
        with file, suppress(InvalidEntry):
            return EntryReader(file, key, None, secret=self.secret).facts
        return None


class FolderInspector(StoreInspector):
    """The folder of a disk tier."""

    name = "disk"

    def __init__(self, folder: str | Path, secret: bytes = b"") -> None:
        self.folder = Path(folder)
        self.secret = secret
        self._lock_file: TextIO | None = None
        if not (self.folder / "entries").is_dir():
            raise FileError(f"{folder} holds no prefix store; name the folder that `kvfold serve --disk` was given")

    @property
    def is_in_use(self) -> bool:
        return self._lock_file is None and is_locked(self.folder)

    def find(self) -> Iterator[EntryInfo]:
        for path in (self.folder / "entries").glob(f"*/*/*{SUFFIX}"):
            with suppress(OSError):
                found = _found(path)
                if found is not None:
                    yield found

    def open(self, key: Key) -> BinaryIO | None:
        try:
            return path_of(self.folder, key).open("rb")
        except OSError:
            return None

    def delete(self, key: Key) -> None:
        self.lock()
        try:
            path_of(self.folder, key).unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"an entry in {self.folder} cannot be deleted ({error}); make it writable") from error

    def lock(self) -> None:
        if self._lock_file is None:
            self._lock_file = lock_folder(self.folder, self.folder / "entries")

    def close(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


def _found(path: Path) -> EntryInfo | None:
    key, stat = key_of(path), path.stat()
    if key is None:
        return None
    with path.open("rb") as file:
        return EntryInfo(key, "disk", stat.st_size, stat.st_mtime, *claims(file.read(PREAMBLE_BYTES)))


class RedisInspector(StoreInspector):
    """A Redis server shared by kvfold servers."""

    name = "redis"

    def __init__(self, url: str, secret: bytes = b"") -> None:
        self.secret = secret
        self._tier = RedisTier(url)
        if not self._tier.answers():
            raise InputError("no Redis server answers at --redis; start it, or correct the address")

    def find(self) -> Iterator[EntryInfo]:
        keys = self._tier.keys()
        for key in keys:
            looked = self._tier.look(key)
            if looked is not None:
                num_bytes, left_s, begins = looked
                yield EntryInfo(key, "redis", num_bytes, time.time() + left_s, *claims(begins))

    def open(self, key: Key) -> BinaryIO | None:
        return self._tier.get(key, 0.0)

    def delete(self, key: Key) -> None:
        self._tier.delete(key)
        if self._tier.look(key) is not None:
            raise FileError("Redis refused to delete an entry; use a primary server, and an account with DEL")

    def lock(self) -> None:
        """No-op: Redis is shared, every client may delete."""

    def close(self) -> None:
        self._tier.close()
