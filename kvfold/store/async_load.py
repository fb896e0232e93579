"""Chunks of a prefix on their way from copies of entries to the pages of a sequence, layer by layer.

Reading and checking blocks takes most of the time, and needs no interpreter: threads do it for a layer while the one
before it is written to its pages, and while the model runs over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat

from kvfold.errors import PrefixLost
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.format import EntryReader, Fault, Fields
from kvfold.store.entry.slots import Filling
from kvfold.store.tiers.cascade import Copy

_READERS = 4  # threads

SetAside = Callable[[Copy, Fault], None]
Unpack = Callable[[Sequence[Copy], Sequence[Fields], LayerPages], list[Fields]]


class BadCopy(Exception):
    """A copy that must not be used, and why; becomes PrefixLost in the thread that runs the model."""

    def __init__(self, copy: Copy, fault: Fault) -> None:
        super().__init__(str(fault))
        self.copy = copy
        self.fault = fault


@contextmanager
def blaming(copy: Copy) -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        raise BadCopy(copy, fault) from fault


@contextmanager
def losing(set_aside: SetAside) -> Iterator[None]:
    """A bad copy is set aside, and what it was read for is lost."""
    try:
        yield
    except BadCopy as bad:
        set_aside(bad.copy, bad.fault)
        raise PrefixLost(str(bad)) from bad


class Arrival:
    """Consecutive chunks for a sequence that ends where they begin, which it is to have as `loading`; OutOfPages where
    it cannot. Closes the files of the copies."""

    def __init__(
        self,
        sequence: SequenceCache,
        copies: Sequence[Copy],
        readers: Sequence[EntryReader],
        unpack: Unpack,
        set_aside: SetAside,
    ) -> None:
        self.then: Callable[[], None] = lambda: None
        self._sequence, self._copies, self._unpack, self._set_aside = sequence, copies, unpack, set_aside
        self._filling = Filling(sequence, copies[-1].key.end)
        self._streams = [reader.blocks() for reader in readers]
        self._threads = ThreadPoolExecutor(_READERS, "kvfold-read")
        self._read = self._start_reading(0)

    def upto(self, layer: int) -> None:
        while self._filling.num_filled <= layer:
            with losing(self._set_aside):
                self._next_layer()
            if self._filling.num_filled == len(self._filling.layers):
                self.close()
                self.then()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for copy in self._copies:
            copy.file.close()
        self._sequence.loading = None

    def _next_layer(self) -> None:
        index, layers = self._filling.num_filled, self._filling.layers
        packed = list(self._read)
        if index + 1 < len(layers):
            self._read = self._start_reading(index + 1)
        self._filling.fill(self._unpack(self._copies, packed, layers[index]))

    def _start_reading(self, layer: int) -> Iterator[Fields]:
        return self._threads.map(_next_block, self._copies, self._streams, repeat(layer))


def _next_block(copy: Copy, stream: Iterator[tuple[str, Fields]], layer: int) -> Fields:
    """The fields of a layer, of one copy."""
    with blaming(copy):
        name, fields = next(stream, ("", {}))
        if name != str(layer):
            raise Fault("corrupt", f'its block {layer} is called "{name}"')
    return fields
