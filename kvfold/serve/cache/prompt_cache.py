"""One tenant's prompt cache: entries with their time to live, and the stored KV prefixes they refer to.

Entries are indexed in this process and written in the background as markers to the tiers of the prefix store, where the
next process or another server finds them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from kvfold.serve.cache.breakpoints import Boundary, CacheWrite
from kvfold.store.markers import CacheMarkers, Marker
from kvfold.store.prefixes import Prefixes


class PromptCache:
    """Used by the scheduler's thread only."""

    def __init__(self, prefixes: Prefixes, markers: CacheMarkers, entries: Entries | None = None) -> None:
        self.prefixes = prefixes
        self._entries = Entries() if entries is None else entries
        self._markers = markers

    def split(self, cache_key: str) -> PromptCache:
        """The cache of one `prompt_cache_key`, with tensors of its own, so that not even the TTFT reveals what requests
        of another key sent. Digests of boundaries cover the key, so entries share one index."""
        tenant = json.dumps([self.prefixes.binding.tenant, cache_key])
        prefixes = self.prefixes.for_tenant(tenant)
        return PromptCache(prefixes, self._markers.bound_to(prefixes.binding), self._entries)

    def miss_reason(self, boundary: Boundary, at: float, now: float) -> Miss | None:
        """None on a hit, for a request that started `at`."""
        missed = self._entries.miss_reason(boundary.digest, now)
        if missed is None:
            return None
        ttl_s = self._markers.find(_marker(boundary), at)
        if ttl_s is None:
            return "expired" if "expired" in (missed, self._markers.miss_reason(_marker(boundary))) else "absent"
        self._entries.write(boundary.digest, ttl_s, at)
        return None

    def touch(self, boundary: Boundary, at: float) -> None:
        """Refresh on a hit by a request that started `at`."""
        self._entries.touch(boundary.digest, at)
        self._markers.touch(_marker(boundary), at)

    def write(self, write: CacheWrite, at: float) -> None:
        self._entries.write(write.boundary.digest, write.ttl_s, at)
        self._markers.write(_marker(write.boundary), write.ttl_s, at)

    def delete(self, boundary: Boundary) -> None:
        """Its tensors were evicted."""
        self._entries.delete(boundary.digest)
        self._markers.delete(_marker(boundary))


def _marker(boundary: Boundary) -> Marker:
    return Marker(boundary.end, boundary.digest)


MAX_ENTRIES = 1 << 16

Miss = Literal["absent", "expired", "lost", "unmarked", "refused"]


@dataclass
class Entry:
    ttl_s: float
    used_at: float

    def is_live(self, now: float) -> bool:
        return now < self.used_at + self.ttl_s


class Entries:
    """By digest, in LRU order; used by the scheduler's thread only."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max = max_entries
        self._found: OrderedDict[bytes, Entry] = OrderedDict()

    def miss_reason(self, digest: bytes, now: float) -> Miss | None:
        """None on a hit."""
        entry = self._found.get(digest)
        if entry is None:
            return "absent"
        return None if entry.is_live(now) else "expired"

    def touch(self, digest: bytes, at: float) -> None:
        """Refresh on a hit by a request that started `at`."""
        entry = self._found[digest]
        entry.used_at = max(entry.used_at, at)
        self._found.move_to_end(digest)

    def write(self, digest: bytes, ttl_s: float, at: float) -> None:
        self._found[digest] = Entry(ttl_s, at)
        self._found.move_to_end(digest)
        if len(self._found) > self._max:
            self._found.popitem(last=False)

    def delete(self, digest: bytes) -> None:
        self._found.pop(digest, None)

    def __len__(self) -> int:
        return len(self._found)
