"""From copies of entries to slots in pages, checked block by block and layer by layer; a bad one is set aside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.async_load import Arrival, SetAside, blaming, losing
from kvfold.store.entry.encodings import FORMS, Likes
from kvfold.store.entry.format import EntryReader, Fault, Fields
from kvfold.store.entry.slots import likes_of
from kvfold.store.entry.snapshot import put_back
from kvfold.store.key import Binding
from kvfold.store.tiers.cascade import Copy


class Loader:
    """Reads entries of one binding. What it raises, PrefixLost or OutOfPages, leaves a sequence to be released."""

    def __init__(self, binding: Binding, secret: bytes, max_bytes: int, set_aside: SetAside) -> None:
        self._binding = binding
        self._form = FORMS[binding.form]
        self._secret = secret
        self._max_bytes = max_bytes
        self._set_aside = set_aside

    def load_chunks(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Have consecutive chunks on their way to a sequence that ends where they begin."""
        with losing(self._set_aside):
            readers = [self._open(copy) for copy in copies]
        sequence.loading = Arrival(sequence, copies, readers, self._unpack_all, self._set_aside)
        return readers

    def load_snapshot(self, sequence: SequenceCache, copies: Sequence[Copy]) -> list[EntryReader]:
        """Fill an empty sequence from the one copy given."""
        (copy,) = copies
        with losing(self._set_aside), copy.file:
            reader = self._open(copy)
            with blaming(copy):
                put_back(sequence, copy.key.end, reader.blocks())
        return [reader]

    def _open(self, copy: Copy) -> EntryReader:
        with blaming(copy):
            return EntryReader(copy.file, copy.key, self._binding, secret=self._secret, max_bytes=self._max_bytes)

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
                with blaming(copy):
                    self._form.unpack([fields], likes)
            raise
