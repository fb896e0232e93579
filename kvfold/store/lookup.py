"""One lookup in the prefix cache: share the device's prefix copy-on-write, load the rest from the byte tiers.

Entries are checked block by block while they are loaded into KV pages, and invalid copies are quarantined. A failed
attempt (invalid copy, out of pages) releases everything; the caller decides whether to retry. Chunks load
asynchronously, and may still be loading when a lookup ends: reading and checking blocks takes most of the time and
releases the GIL; threads do it for a layer while the layer before it is copied to its pages and the model runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import NamedTuple

from kvfold.errors import PrefixLost
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.context import StoreContext
from kvfold.store.entry.encodings import ENCODINGS, TensorSpecs
from kvfold.store.entry.format import EntryReader, Fields, InvalidEntry
from kvfold.store.entry.snapshot import LayerwiseAppend, chunk_specs, restore_snapshot
from kvfold.store.key import Binding, Key
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.tiered_cache import Copy

_READERS = 4  # threads

OnBadCopy = Callable[[Copy, InvalidEntry], None]
Unpack = Callable[[Sequence[Copy], Sequence[Fields], LayerPages], list[Fields]]


class BadCopy(Exception):
    """An invalid copy and its error; becomes PrefixLost in the model's thread."""

    def __init__(self, copy: Copy, error: InvalidEntry) -> None:
        super().__init__(str(error))
        self.copy = copy
        self.error = error


@contextmanager
def as_bad_copy(copy: Copy) -> Iterator[None]:
    try:
        yield
    except InvalidEntry as error:
        raise BadCopy(copy, error) from error


@contextmanager
def as_prefix_lost(on_bad_copy: OnBadCopy) -> Iterator[None]:
    """Quarantines a bad copy and raises PrefixLost for the lookup."""
    try:
        yield
    except BadCopy as bad:
        on_bad_copy(bad.copy, bad.error)
        raise PrefixLost(str(bad)) from bad


class PrefixLoad:
    """Loads consecutive chunks into a sequence that ends where they begin, as its `loading`; OutOfPages if they do not
    fit. Closes the copies' files."""

    def __init__(
        self,
        sequence: SequenceCache,
        copies: Sequence[Copy],
        readers: Sequence[EntryReader],
        unpack: Unpack,
        on_bad_copy: OnBadCopy,
    ) -> None:
        self.then: Callable[[], None] = lambda: None
        self._sequence, self._copies, self._unpack, self._on_bad_copy = sequence, copies, unpack, on_bad_copy
        self._target = LayerwiseAppend(sequence, copies[-1].key.end)
        self._streams = [reader.blocks() for reader in readers]
        self._threads = ThreadPoolExecutor(_READERS, "kvfold-read")
        self._read = self._start_reading(0)

    def upto(self, layer: int) -> None:
        while self._target.num_loaded <= layer:
            with as_prefix_lost(self._on_bad_copy):
                self._next_layer()
            if self._target.num_loaded == len(self._target.layers):
                self.close()
                self.then()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for copy in self._copies:
            copy.file.close()
        self._sequence.loading = None

    def _next_layer(self) -> None:
        index, layers = self._target.num_loaded, self._target.layers
        packed = list(self._read)
        if index + 1 < len(layers):
            self._read = self._start_reading(index + 1)
        self._target.append(self._unpack(self._copies, packed, layers[index]))

    def _start_reading(self, layer: int) -> Iterator[Fields]:
        return self._threads.map(_next_block, self._copies, self._streams, repeat(layer))


def _next_block(copy: Copy, stream: Iterator[tuple[str, Fields]], layer: int) -> Fields:
    """Fields of a layer from one copy."""
    with as_bad_copy(copy):
        name, fields = next(stream, ("", {}))
        if name != str(layer):
            raise InvalidEntry("corrupt", f'its block {layer} is called "{name}"')
    return fields


@dataclass(frozen=True)
class Loader:
    """Reads entries of one binding. After PrefixLost or OutOfPages the caller releases the sequence."""

    _binding: Binding
    _secret: bytes
    _max_bytes: int
    _on_bad_copy: OnBadCopy

    def load_chunks(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Start loading consecutive chunks into a sequence that ends where they begin."""
        with as_prefix_lost(self._on_bad_copy):
            readers = [self._open(copy) for copy in copies]
        sequence.loading = PrefixLoad(sequence, copies, readers, self._unpack_all, self._on_bad_copy)
        return readers

    def load_snapshot(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Restore an empty sequence from the one copy given."""
        (copy,) = copies
        with as_prefix_lost(self._on_bad_copy), copy.file:
            reader = self._open(copy)
            with as_bad_copy(copy):
                restore_snapshot(sequence, copy.key.end, reader.blocks())
        return [reader]

    def _open(self, copy: Copy) -> EntryReader:
        with as_bad_copy(copy):
            return EntryReader(copy.file, copy.key, self._binding, secret=self._secret, max_bytes=self._max_bytes)

    def _unpack_all(self, copies: Sequence[Copy], packed: Sequence[Fields], pages: LayerPages) -> list[Fields]:
        """One layer of all chunks; equally long ones at once (all but a last partial one)."""
        found: list[Fields] = []
        for num_tokens, group in groupby(copies, lambda copy: copy.key.num_tokens):
            mine, begin = list(group), len(found)
            found += self._unpack(mine, packed[begin : begin + len(mine)], chunk_specs(pages, num_tokens))
        return found

    def _unpack(self, copies: Sequence[Copy], packed: Sequence[Fields], specs: TensorSpecs) -> list[Fields]:
        """All at once; on an error each on its own, to find the invalid copy."""
        encoding = ENCODINGS[self._binding.form]
        try:
            return encoding.unpack(packed, specs)
        except InvalidEntry:
            for copy, fields in zip(copies, packed, strict=True):
                with as_bad_copy(copy):
                    encoding.unpack([fields], specs)
            raise


_OPEN_FILES = 64  # entries read side by side


class UsedCopy(NamedTuple):
    """A copy with a valid header; its blocks are valid once everything is loaded."""

    copy: Copy
    lease: Lease
    num_bytes: int


@dataclass
class Lookup:
    """For a request that started `at`: `sequence` has the prefix found so far, `used` the copies read for it."""

    _store: StoreContext
    _loader: Loader
    _new: Callable[[], SequenceCache]
    _at: float
    sequence: SequenceCache | None = None
    used: list[UsedCopy] = field(default_factory=list)

    @property
    def tier(self) -> str:
        """The slowest tier read."""
        order = self._store.tiered.tiers
        return max((one.copy.tier for one in self.used), key=order.index).name if self.used else "device"

    def read_chunks(self, keys: Sequence[Key], tokens: Sequence[int]) -> list[Key]:
        """Keys of the longest run of stored chunks of the tokens that may be reused; the sequence may be longer than
        the last one, by pages that the device holds. Raises PrefixLost or OutOfPages."""
        device = self._store.device
        holder, length = (None, 0) if device is None else device.longest(keys[0].scope, tokens)
        done = sum(key.end <= length for key in keys)
        copies = self._open_all(keys[done : done + _OPEN_FILES])
        if copies:
            length = keys[done].start  # chunks are appended to whole ones
        if device is not None and holder is not None and length:
            with self._or_nothing(copies):
                self.sequence = device.share(holder, length, self._at)
        while copies:
            self._fill(copies, self._loader.load_chunks)
            done += len(copies)
            copies = self._open_all(keys[done : done + _OPEN_FILES])
        self._store.discard(keys[done:])
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
            self._store.discard([key])
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
