"""One lookup in the prefix cache: share the device's prefix copy-on-write, load the rest from the byte tiers.

A failed attempt (invalid copy, out of pages) releases everything; the caller decides whether to retry. The last chunks
may still be loading when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvfold.pages.sequence import SequenceCache
from kvfold.store.context import StoreContext
from kvfold.store.entry.format import EntryReader
from kvfold.store.key import Key
from kvfold.store.load import Loader
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.tiered_cache import Copy

_OPEN_FILES = 64  # entries read side by side


class UsedCopy(NamedTuple):
    """A copy with a valid header; its blocks are valid once everything is loaded."""

    copy: Copy
    lease: Lease
    num_bytes: int


class Lookup:
    """For a request that started `at`: `sequence` has the prefix found so far, `used` the copies read for it."""

    def __init__(self, store: StoreContext, loader: Loader, new: Callable[[], SequenceCache], at: float) -> None:
        self.sequence: SequenceCache | None = None
        self.used: list[UsedCopy] = []
        self._store = store
        self._loader = loader
        self._new = new
        self._at = at

    @property
    def tier(self) -> str:
        """The slowest tier read."""
        order = self._store.tiered.tiers
        return max((one.copy.tier for one in self.used), key=order.index).name if self.used else "device"

    def read_chunks(self, keys: Sequence[Key]) -> list[Key]:
        """Keys of the longest run of stored chunks. Raises PrefixLost or OutOfPages."""
        done = 1 + self._share(keys)
        while copies := self._open_all(keys[done : done + _OPEN_FILES]):
            self._fill(copies, self._loader.load_chunks)
            done += len(copies)
        self._store.key_index.discard(keys[done:])
        return list(keys[:done])

    def read_snapshot(self, keys: Sequence[Key]) -> list[Key]:
        """Key of the longest stored snapshot. Raises PrefixLost or OutOfPages."""
        shared = self._share(keys)
        for key in reversed(keys[shared + 1 :]):
            copies = self._open_all([key])
            if copies:
                self.release()  # the device's prefix is shorter
                self._fill(copies, self._loader.load_snapshot)
                return [key]
            self._store.key_index.discard([key])
        return list(keys[shared : shared + 1]) if self.sequence is not None else []

    def _share(self, keys: Sequence[Key]) -> int:
        """Index of the longest key on the device, whose pages are then shared; -1 if there is none."""
        device = self._store.device
        for index in reversed(range(len(keys))):
            self.sequence = None if device is None else device.get(keys[index], self._at)
            if self.sequence is not None:
                return index
        return -1

    def _open_all(self, keys: Sequence[Key]) -> list[Copy]:
        """Copies of the first keys, up to one that no tier has."""
        copies: list[Copy] = []
        for key in keys:
            copy = self._store.tiered.get(key, self._at)
            if copy is None:
                break
            copies.append(copy)
        return copies

    def _fill(
        self, copies: Sequence[Copy], load: Callable[[SequenceCache, Sequence[Copy]], Sequence[EntryReader]]
    ) -> None:
        with self._or_nothing(copies):
            if self.sequence is None:
                self.sequence = self._new()
            self.sequence.wait_loaded()  # those opened before
            readers = load(self.sequence, copies)
        for copy, reader in zip(copies, readers, strict=True):
            lease = Lease(self._at, reader.preamble.ttl_s, reader.preamble.saved_s)
            self.used.append(UsedCopy(copy, lease, reader.num_bytes))

    def wait(self) -> None:
        """Wait until everything is loaded. Raises PrefixLost."""
        if self.sequence is not None:
            with self._or_nothing():
                self.sequence.wait_loaded()

    @contextmanager
    def _or_nothing(self, copies: Sequence[Copy] = ()) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release()
            for copy in copies:
                copy.file.close()
            raise

    def release(self) -> None:
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None
