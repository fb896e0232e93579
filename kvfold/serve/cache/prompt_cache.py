"""What one tenant's requests share: entries of the contract, and the stored tensors they stand for.

Entries are known to this process, and written behind the reply to where the tensors are: the next process, or another
server that shares a tier, finds them there.
"""

from __future__ import annotations

import json

from kvfold.serve.cache.cache_breakpoints import Mark, Place
from kvfold.serve.cache.entries import Entries, Miss
from kvfold.store.cache_markers import Marks, Spot
from kvfold.store.prefixes import Prefixes


class Shelf:
    """Used by the scheduler's thread alone."""

    def __init__(self, prefixes: Prefixes, marks: Marks, entries: Entries | None = None) -> None:
        self.prefixes = prefixes
        self._entries = Entries() if entries is None else entries
        self._marks = marks

    def split(self, cache_key: str) -> Shelf:
        """What requests of one `prompt_cache_key` share: tensors of their own, so that not even the time to the first
        token tells what requests of another key sent. Digests of places cover the key, so entries can lie together."""
        tenant = json.dumps([self.prefixes.binding.tenant, cache_key])
        prefixes = self.prefixes.for_tenant(tenant)
        return Shelf(prefixes, self._marks.bound_to(prefixes.binding), self._entries)

    def look(self, place: Place, at: float, now: float) -> Miss | None:
        """None if there is an entry, for a request that started `at`."""
        missed = self._entries.look(place.digest, now)
        if missed is None:
            return None
        ttl_s = self._marks.find(_spot(place), at)
        if ttl_s is None:
            return "expired" if "expired" in (missed, self._marks.why(_spot(place))) else "absent"
        self._entries.write(place.digest, ttl_s, at)
        return None

    def use(self, place: Place, at: float) -> None:
        """A request that started `at` read it."""
        self._entries.use(place.digest, at)
        self._marks.use(_spot(place), at)

    def write(self, mark: Mark, at: float) -> None:
        self._entries.write(mark.place.digest, mark.ttl_s, at)
        self._marks.write(_spot(mark.place), mark.ttl_s, at)

    def forget(self, place: Place) -> None:
        """Its tensors are gone."""
        self._entries.forget(place.digest)
        self._marks.forget(_spot(place))


def _spot(place: Place) -> Spot:
    return Spot(place.end, place.digest)
