"""In-process index of prompt-cache entries: time to live and last use by prefix digest, LRU-bounded.

This is the API's view of the cache (usage, expiry); the tensors are in `kvfold.store`. Times are request *start* times,
so a reply that takes four minutes leaves one minute of five. An entry is written when prefill ends; concurrent requests
with the same prefix each write their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

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
