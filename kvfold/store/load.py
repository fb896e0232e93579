"""From copies of entries to slots in pages, checked block by block and layer by layer; a bad one is named.

Reading and checking blocks takes most of the time, and needs no interpreter: threads do it for a layer while the layer
before it is written to its pages.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import groupby, repeat

from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.cascade import Copy
from kvfold.store.entry import EntryReader, Fault, Fields
from kvfold.store.form import FORMS, Likes
from kvfold.store.key import Binding
from kvfold.store.slots import fill, likes_of
from kvfold.store.snapshot import put_back

_READERS = 4  # threads


class BadCopy(Exception):
    """A copy that must not be used, and why; caught by the lookup that asked for it."""

    def __init__(self, copy: Copy, fault: Fault) -> None:
        super().__init__(str(fault))
        self.copy = copy
        self.fault = fault


class Loader:
    """Reads entries of one binding."""

    def __init__(self, binding: Binding, secret: bytes, max_bytes: int) -> None:
        self._binding = binding
        self._form = FORMS[binding.form]
        self._secret = secret
        self._max_bytes = max_bytes

    def load_chunks(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Append consecutive chunks to a sequence that ends where they begin. Raises BadCopy or OutOfPages; the
        sequence is then to be released."""
        readers = [self._open(copy) for copy in copies]
        with closing(self._layers(sequence, copies, readers)) as layers:
            fill(sequence, copies[-1].key.end, layers)
        return readers

    def load_snapshot(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Fill an empty sequence from the one copy given. Raises as above."""
        (copy,) = copies
        reader = self._open(copy)
        with _blaming(copy):
            put_back(sequence, copy.key.end, reader.blocks())
        return [reader]

    def _open(self, copy: Copy) -> EntryReader:
        with _blaming(copy):
            return EntryReader(copy.file, copy.key, self._binding, secret=self._secret, max_bytes=self._max_bytes)

    def _layers(
        self, sequence: SequenceCache, copies: Sequence[Copy], readers: Sequence[EntryReader]
    ) -> Generator[list[Fields]]:
        """Of every layer, the fields of all chunks."""
        streams = [reader.blocks() for reader in readers]
        with ThreadPoolExecutor(_READERS, "kvfold-read") as threads:
            read = threads.map(_next_block, copies, streams, repeat(0))
            for index, pages in enumerate(sequence.tail.layers, start=1):
                packed = list(read)
                if index < len(sequence.tail.layers):
                    read = threads.map(_next_block, copies, streams, repeat(index))
                yield self._unpack_all(copies, packed, pages)

    def _unpack_all(self, copies: Sequence[Copy], packed: Sequence[Fields], pages: LayerPages) -> list[Fields]:
        """Of one layer, chunks that are equally long at once: all but a last one that ends at a marker."""
        found: list[Fields] = []
        for num_tokens, group in groupby(copies, lambda copy: copy.key.num_tokens):
            mine, begin = list(group), len(found)
            found += self._unpack(mine, packed[begin : begin + len(mine)], likes_of(pages, num_tokens))
        return found

    def _unpack(self, copies: Sequence[Copy], packed: Sequence[Fields], likes: Likes) -> list[Fields]:
        """All at once; each on its own to find the one that is bad."""
        try:
            return self._form.unpack(packed, likes)
        except Fault:
            for copy, fields in zip(copies, packed, strict=True):
                with _blaming(copy):
                    self._form.unpack([fields], likes)
            raise


def _next_block(copy: Copy, stream: Iterator[tuple[str, Fields]], index: int) -> Fields:
    """The fields of a layer, of one copy."""
    with _blaming(copy):
        name, fields = next(stream, ("", {}))
        if name != str(index):
            raise Fault("corrupt", f'its block {index} is called "{name}"')
    return fields


@contextmanager
def _blaming(copy: Copy) -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        raise BadCopy(copy, fault) from fault
