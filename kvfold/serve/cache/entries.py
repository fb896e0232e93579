"""Which prefixes were cached, for whom and until when: the contract's side of the cache, beside the store's tensors.

Times are those at which requests *started*, so a reply that takes four minutes leaves one minute of five. An entry is
written when the reply begins; requests that came before then all write their own.
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
    """By digest, the least recently used first; used by the scheduler's thread alone."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max = max_entries
        self._found: OrderedDict[bytes, Entry] = OrderedDict()

    def look(self, digest: bytes, now: float) -> Miss | None:
        """None if it is there."""
        entry = self._found.get(digest)
        if entry is None:
            return "absent"
        return None if entry.is_live(now) else "expired"

    def use(self, digest: bytes, at: float) -> None:
        """A request that started `at` read it."""
        entry = self._found[digest]
        entry.used_at = max(entry.used_at, at)
        self._found.move_to_end(digest)

    def write(self, digest: bytes, ttl_s: float, at: float) -> None:
        self._found[digest] = Entry(ttl_s, at)
        self._found.move_to_end(digest)
        if len(self._found) > self._max:
            self._found.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        self._found.pop(digest, None)

    def __len__(self) -> int:
        return len(self._found)
