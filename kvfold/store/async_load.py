"""Asynchronous, layer-wise load of stored chunks into the KV pages of a sequence.

Reading and checking blocks takes most of the time and releases the GIL: threads do it for a layer while the layer
before it is copied to its pages and the model runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat

from kvfold.errors import PrefixLost
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.format import EntryReader, Fields, InvalidEntry
from kvfold.store.entry.slots import LayerwiseAppend
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
