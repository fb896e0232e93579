"""Which entries a bounded tier holds, and which go when room is needed: plain bookkeeping, no I/O, no locks.

Expired entries go first, then those that save the least prefill time per byte, then those that were used longest ago;
of one prompt's chunks, used at the same time, the last goes first: without its parents a chunk cannot be reached. Worth
is compared in powers of two: a short entry, of which more is header, does not give way to a long one nobody uses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvfold.store.key import Key

_SLACK = 64  # heaps are rebuilt when they hold more than twice the entries and this


@dataclass(frozen=True)
class Lease:
    """How long an entry lives and what it is worth: `at` is the start of the request that wrote or read it."""

    at: float
    ttl_s: float
    saved_s: float  # prefill time a hit saves

    @property
    def expires_at(self) -> float:
        return self.at + self.ttl_s


@dataclass
class Record:
    """An entry; marks in the heaps that have another version than it are old and do not count."""

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


_Mark = tuple[float, float, int, str, int]


class Ledger:
    """`total_bytes <= limit_bytes` holds after every call."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self._records: dict[Key, Record] = {}
        self._keys: dict[str, Key] = {}
        self._versions = count()
        self._by_expiry: list[_Mark] = []
        self._by_worth: list[_Mark] = []

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
        """The caller has made room."""
        self.remove(key)
        assert self.total_bytes + num_bytes <= self.limit_bytes
        self._records[key] = Record(num_bytes, lease.ttl_s, lease.saved_s, lease.expires_at, lease.at)
        self._keys[key.text] = key
        self.total_bytes += num_bytes
        self._mark(key)

    def remove(self, key: Key) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            del self._keys[key.text]
            self.total_bytes -= record.num_bytes

    def touch(self, key: Key, at: float) -> Record:
        """Used by a request that started then: its time to live starts anew, and never ends sooner than before."""
        record = self._records[key]
        record.used_at = max(record.used_at, at)
        record.expires_at = max(record.expires_at, at + record.ttl_s)
        self._mark(key)
        return record

    def expired(self, now: float) -> list[Key]:
        """Entries whose time is over, to be removed by the caller."""
        found = []
        while (key := self._top(self._by_expiry)) is not None and self._records[key].expires_at <= now:
            heapq.heappop(self._by_expiry)
            found.append(key)
        return found

    def victims(self, num_bytes: int) -> list[Key]:
        """What has to go for so many bytes (the limit at most), least worth first, to be removed by the caller."""
        found, free = [], self.limit_bytes - self.total_bytes
        while free < num_bytes and (key := self._top(self._by_worth)) is not None:
            heapq.heappop(self._by_worth)
            found.append(key)
            free += self._records[key].num_bytes
        return found

    def keep(self, key: Key) -> None:
        """One that was `expired` or a victim, and could not be removed: it will be again."""
        self._mark(key)

    def least(self) -> Key | None:
        """The entry worth least."""
        return self._top(self._by_worth)

    def _mark(self, key: Key) -> None:
        record = self._records[key]
        record.version = next(self._versions)
        name = (-key.end, key.text, record.version)
        heapq.heappush(self._by_expiry, (record.expires_at, 0.0, *name))
        heapq.heappush(self._by_worth, (record.worth, record.used_at, *name))
        if max(len(self._by_expiry), len(self._by_worth)) > 2 * len(self._records) + _SLACK:
            self._by_expiry = self._current(self._by_expiry)
            self._by_worth = self._current(self._by_worth)

    def _current(self, marks: list[_Mark]) -> list[_Mark]:
        kept = [mark for mark in marks if self._owner(mark) is not None]
        heapq.heapify(kept)
        return kept

    def _top(self, marks: list[_Mark]) -> Key | None:
        while marks:
            key = self._owner(marks[0])
            if key is not None:
                return key
            heapq.heappop(marks)
        return None

    def _owner(self, mark: _Mark) -> Key | None:
        key = self._keys.get(mark[3])
        return key if key is not None and self._records[key].version == mark[4] else None
