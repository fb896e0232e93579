"""Loads entries into KV pages, checked block by block; invalid copies are quarantined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.async_load import OnBadCopy, PrefixLoad, as_bad_copy, as_prefix_lost
from kvfold.store.entry.encodings import ENCODINGS, TensorSpecs
from kvfold.store.entry.format import EntryReader, Fields, InvalidEntry
from kvfold.store.entry.slots import chunk_specs
from kvfold.store.entry.snapshot import restore_snapshot
from kvfold.store.key import Binding
from kvfold.store.tiers.tiered_cache import Copy


class Loader:
    """Reads entries of one binding. After PrefixLost or OutOfPages the caller releases the sequence."""

    def __init__(self, binding: Binding, secret: bytes, max_bytes: int, on_bad_copy: OnBadCopy) -> None:
        self._binding = binding
        self._encoding = ENCODINGS[binding.form]
        self._secret = secret
        self._max_bytes = max_bytes
        self._on_bad_copy = on_bad_copy

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
        try:
            return self._encoding.unpack(packed, specs)
        except InvalidEntry:
            for copy, fields in zip(copies, packed, strict=True):
                with as_bad_copy(copy):
                    self._encoding.unpack([fields], specs)
            raise
