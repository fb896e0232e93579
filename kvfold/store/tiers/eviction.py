"""Cost-aware LRU eviction with time to live for a byte-bounded tier: bookkeeping only, no I/O, no locks.

Eviction order: expired entries, then the least prefill time saved per byte (rounded to a power of two), then LRU; of
chunks used at the same time the last one first, since a chunk is unreachable without its parents. The rounding keeps a
short entry, whose header weighs more, from being evicted before an unused long one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvfold.store.key import Key

_SLACK = 64  # heaps are rebuilt above twice the number of entries plus this


@dataclass(frozen=True)
class Lease:
    """Time to live and value of an entry; `at`: start of the request that wrote or read it."""

    at: float
    ttl_s: float
    saved_s: float  # prefill time a hit saves

    @property
    def expires_at(self) -> float:
        return self.at + self.ttl_s


@dataclass
class Record:
    """An entry; heap items with another `version` are stale."""

    num_bytes: int
    ttl_s: float
    saved_s: float
    expires_at: float
    used_at: float
    version: int = 0

    @property
    def worth(self) -> float:
        """Seconds saved per byte, as the nearest power of two."""
        return float(round(math.log2(self.saved_s / max(1, self.num_bytes)))) if self.saved_s > 0 else -math.inf


_HeapItem = tuple[float, float, int, str, int]


class Evictor:
    """`total_bytes <= limit_bytes` holds after every call."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self._records: dict[Key, Record] = {}
        self._keys: dict[str, Key] = {}
        self._versions = count()
        self._by_expiry: list[_HeapItem] = []
        self._by_worth: list[_HeapItem] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._records))

    def get(self, key: Key) -> Record | None:
        return self._records.get(key)

    def is_live(self, key: Key, now: float) -> bool:
        record = self._records.get(key)
        return record is not None and record.expires_at > now

    def add(self, key: Key, num_bytes: int, lease: Lease) -> None:
        """The caller has evicted enough."""
        self.remove(key)
        assert self.total_bytes + num_bytes <= self.limit_bytes
        self._records[key] = Record(num_bytes, lease.ttl_s, lease.saved_s, lease.expires_at, lease.at)
        self._keys[key.text] = key
        self.total_bytes += num_bytes
        self._push(key)

    def remove(self, key: Key) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            del self._keys[key.text]
            self.total_bytes -= record.num_bytes

    def touch(self, key: Key, at: float) -> Record:
        """Refresh recency and time to live for a request that started `at`; expiry never moves back."""
        record = self._records[key]
        record.used_at = max(record.used_at, at)
        record.expires_at = max(record.expires_at, at + record.ttl_s)
        self._push(key)
        return record

    def expired(self, now: float) -> list[Key]:
        """Expired entries, to be removed by the caller."""
        found = []
        while (key := self._top(self._by_expiry)) is not None and self._records[key].expires_at <= now:
            heapq.heappop(self._by_expiry)
            found.append(key)
        return found

    def victims(self, num_bytes: int) -> list[Key]:
        """Entries to evict for `num_bytes` (at most the limit), least valuable first, to be removed by the caller."""
        found, free = [], self.limit_bytes - self.total_bytes
        while free < num_bytes and (key := self._top(self._by_worth)) is not None:
            heapq.heappop(self._by_worth)
            found.append(key)
            free += self._records[key].num_bytes
        return found

    def reinsert(self, key: Key) -> None:
        """Put back an `expired` entry or victim that could not be deleted."""
        self._push(key)

    def least_valuable(self) -> Key | None:
        return self._top(self._by_worth)

    def _push(self, key: Key) -> None:
        record = self._records[key]
        record.version = next(self._versions)
        name = (-key.end, key.text, record.version)
        heapq.heappush(self._by_expiry, (record.expires_at, 0.0, *name))
        heapq.heappush(self._by_worth, (record.worth, record.used_at, *name))
        if max(len(self._by_expiry), len(self._by_worth)) > 2 * len(self._records) + _SLACK:
            self._by_expiry = self._current(self._by_expiry)
            self._by_worth = self._current(self._by_worth)

    def _current(self, heap: list[_HeapItem]) -> list[_HeapItem]:
        kept = [item for item in heap if self._owner(item) is not None]
        heapq.heapify(kept)
        return kept

    def _top(self, heap: list[_HeapItem]) -> Key | None:
        while heap:
            key = self._owner(heap[0])
            if key is not None:
                return key
            heapq.heappop(heap)
        return None

    def _owner(self, item: _HeapItem) -> Key | None:
        key = self._keys.get(item[3])
        return key if key is not None and self._records[key].version == item[4] else None
