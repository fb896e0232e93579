"""Persistent cache markers: a record that a prefix was cached up to a breakpoint, stored as an entry without blocks.

A marker has its own time to live, survives a restart in persistent tiers, and is shared by servers that share a tier.
The caller's digest covers everything that must match.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvfold.store.context import StoreContext
from kvfold.store.entry.format import EntryReader, InvalidEntry, encode
from kvfold.store.events import Reason
from kvfold.store.key import Binding, Key
from kvfold.store.tiers.eviction import Lease

_NUM_BYTES = 1024  # nominal, in the write queue
_SAVED_S = 1.0  # nominal: worth far more per byte than tensors, which are evicted first


class Marker(NamedTuple):
    """A prompt length and the 32-byte digest of the prompt up to there."""

    end: int
    digest: bytes


class CacheMarkers:
    """Markers of one binding (model, policy, tenant). Used by the model's thread."""

    def __init__(self, store: StoreContext, binding: Binding) -> None:
        self._store = store
        self._binding = replace(binding, kind="marks")

    def bound_to(self, binding: Binding) -> CacheMarkers:
        """Markers of another binding in the same store."""
        return CacheMarkers(self._store, binding)

    def find(self, marker: Marker, at: float) -> float | None:
        """Its time to live in seconds, or None; a hit by a request that started `at` refreshes it."""
        copy = self._store.tiered.get(self._key(marker), at)
        if copy is None:
            return None
        with copy.file as file:
            try:
                return EntryReader(file, copy.key, self._binding, secret=self._store.secret).preamble.ttl_s
            except InvalidEntry as error:
                self._store.tiered.quarantine(copy, error)
                return None

    def miss_reason(self, marker: Marker) -> Reason:
        """Why a marker was not found."""
        return self._store.key_index.miss_reason(self._key(marker))

    def write(self, marker: Marker, ttl_s: float, at: float) -> None:
        key, lease = self._key(marker), Lease(at, ttl_s, _SAVED_S)
        self._store.tiered.put_async(
            key, _NUM_BYTES, partial(encode, key, self._binding, {}, lease, self._store.secret), lease
        )

    def touch(self, marker: Marker, at: float) -> None:
        """Refresh its time to live in every tier, for a request that started `at`."""
        self._store.tiered.touch_async([], [self._key(marker)], at)

    def delete(self, marker: Marker) -> None:
        self._store.tiered.delete_async(self._key(marker))

    def _key(self, marker: Marker) -> Key:
        return Key(self._binding.scope, 0, marker.end, marker.digest.hex())
