"""That a prefix was cached: a record beside its tensors, in the same tiers, as an entry without blocks.

It has a life of its own, survives a restart where a tier does, and is shared by servers that share a tier. A place in a
prompt has a digest of its caller's, over everything that has to agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvfold.store.context import StoreContext
from kvfold.store.entry.format import EntryReader, Fault, encode
from kvfold.store.events import Reason
from kvfold.store.key import Binding, Key
from kvfold.store.tiers.eviction import Lease

_NUM_BYTES = 1024  # about, of one that waits to be written
_SAVED_S = 1.0  # nominal: it is worth far more than its bytes, so tensors go first


class Spot(NamedTuple):
    """A length of a prompt, and the 32 bytes that name everything up to there."""

    end: int
    digest: bytes


class Marks:
    """Of one model under one policy, for one tenant: those of `binding`. Used by the thread that runs the model."""

    def __init__(self, store: StoreContext, binding: Binding) -> None:
        self._store = store
        self._binding = replace(binding, kind="marks")

    def bound_to(self, binding: Binding) -> Marks:
        """In the same store."""
        return Marks(self._store, binding)

    def find(self, spot: Spot, at: float) -> float | None:
        """Its time to live in seconds, if it is there; a request that started `at` uses it."""
        copy = self._store.cascade.get(self._key(spot), at)
        if copy is None:
            return None
        with copy.file as file:
            try:
                return EntryReader(file, copy.key, self._binding, secret=self._store.secret).preamble.ttl_s
            except Fault as fault:
                self._store.cascade.set_aside(copy, fault)
                return None

    def why(self, spot: Spot) -> Reason:
        """Why it is not there."""
        return self._store.known.why(self._key(spot))

    def write(self, spot: Spot, ttl_s: float, at: float) -> None:
        key, lease = self._key(spot), Lease(at, ttl_s, _SAVED_S)
        self._store.cascade.put_later(
            key, _NUM_BYTES, partial(encode, key, self._binding, {}, lease, self._store.secret), lease
        )

    def use(self, spot: Spot, at: float) -> None:
        """A request that started `at` read it: it lives longer, in every tier."""
        self._store.cascade.slide_later([], [self._key(spot)], at)

    def forget(self, spot: Spot) -> None:
        self._store.cascade.delete_later(self._key(spot))

    def _key(self, spot: Spot) -> Key:
        return Key(self._binding.scope, 0, spot.end, spot.digest.hex())
