"""What a store holds, seen from outside: no ownership, no waiting for one, and reading makes nothing live longer.

A folder is read by its files' names, sizes and times, so that an operator can look while a server works in it; what the
server deletes meanwhile is simply not there. Only deleting asks for the folder itself.
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
from kvfold.store.entry.format import PREAMBLE_BYTES, EntryReader, Fault, peek
from kvfold.store.key import Key
from kvfold.store.tiers.disk import SUFFIX, key_of, path_of
from kvfold.store.tiers.folder import is_owned, own
from kvfold.store.tiers.quarantine import Quarantine
from kvfold.store.tiers.redis import RedisTier


@dataclass(frozen=True)
class Found:
    """An entry as its place tells of it; `ttl_s` and `saved_s` are what its first bytes claim."""

    key: Key
    place: str
    num_bytes: int
    expires_at: float
    ttl_s: int
    saved_s: float


class View(ABC):
    """`name`: disk or redis. `secret`: what the servers sign entries with."""

    name: str
    secret: bytes

    @abstractmethod
    def find(self) -> Iterator[Found]:
        """Entries, in no order."""

    @abstractmethod
    def open(self, key: Key) -> BinaryIO | None:
        """The bytes of an entry, if it is still there."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Forget an entry; FileError if somebody else owns the place, or it does not let go of the entry."""

    @property
    def is_in_use(self) -> bool:
        """Whether a process owns the place, so that nobody else may change it."""
        return False

    @abstractmethod
    def take(self) -> None:
        """Own the place until `close`; FileError if another process does."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the place, and of connections."""

    def set_aside(self, key: Key, quarantine: Quarantine, fault: Fault) -> None:
        """Move a bad entry to quarantine."""
        file = self.open(key)
        if file is not None:
            with file:
                quarantine.keep(key, file.read(quarantine.limit_bytes), str(fault))
        self.delete(key)

    def check(self, key: Key) -> Fault | None:
        """Read an entry to its end: what is wrong with it, if anything is. One that has gone is not wrong."""
        file = self.open(key)
        if file is None:
            return None
        with file:
            try:
                for _ in EntryReader(file, key, None, secret=self.secret).blocks():
                    pass
            except Fault as fault:
                return fault
        return None

    def facts(self, key: Key) -> dict[str, object] | None:
        """What an entry is bound to; None if it cannot be read."""
        file = self.open(key)
        if file is None:
            return None
        with file, suppress(Fault):
            return EntryReader(file, key, None, secret=self.secret).facts
        return None


class FolderView(View):
    """The folder of a disk tier."""

    name = "disk"

    def __init__(self, folder: str | Path, secret: bytes = b"") -> None:
        self.folder = Path(folder)
        self.secret = secret
        self._owned: TextIO | None = None
        if not (self.folder / "entries").is_dir():
            raise FileError(f"{folder} holds no prefix store; name the folder that `kvfold serve --disk` was given")

    @property
    def is_in_use(self) -> bool:
        return self._owned is None and is_owned(self.folder)

    def find(self) -> Iterator[Found]:
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
        self.take()
        try:
            path_of(self.folder, key).unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"an entry in {self.folder} cannot be deleted ({error}); make it writable") from error

    def take(self) -> None:
        if self._owned is None:
            self._owned = own(self.folder, self.folder / "entries")

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()
            self._owned = None


def _found(path: Path) -> Found | None:
    key, stat = key_of(path), path.stat()
    if key is None:
        return None
    with path.open("rb") as file:
        return Found(key, "disk", stat.st_size, stat.st_mtime, *_claims(file.read(PREAMBLE_BYTES)))


def _claims(begins: bytes) -> tuple[int, float]:
    preamble = peek(begins)
    return (0, 0.0) if preamble is None else (preamble.ttl_s, preamble.saved_s)


class RedisView(View):
    """What a Redis server holds of all kvfold servers that use it."""

    name = "redis"

    def __init__(self, url: str, secret: bytes = b"") -> None:
        self.secret = secret
        self._tier = RedisTier(url)
        if not self._tier.answers():
            raise InputError("no Redis server answers at --redis; start it, or correct the address")

    def find(self) -> Iterator[Found]:
        keys = self._tier.keys()
        for key in keys:
            looked = self._tier.look(key)
            if looked is not None:
                num_bytes, left_s, begins = looked
                yield Found(key, "redis", num_bytes, time.time() + left_s, *_claims(begins))

    def open(self, key: Key) -> BinaryIO | None:
        return self._tier.get(key, 0.0)

    def delete(self, key: Key) -> None:
        self._tier.delete(key)
        if self._tier.look(key) is not None:
            raise FileError("Redis does not delete an entry; use a server that is no replica, and an account with DEL")

    def take(self) -> None:
        """Redis is shared: nobody owns it, and everybody may delete."""

    def close(self) -> None:
        self._tier.close()
