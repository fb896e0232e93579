"""Device tier: cached prefixes in the KV arena; a hit shares their sealed pages by reference (copy-on-write).

A cached sequence serves its own length and, under a lossless policy, every shorter prefix: segments are shared, also
the first half or more of one; less than half of one is copied inside the arena. Prefixes are evicted when the arena
runs out of pages. Used by the model's thread only: segments and arenas have no locks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvfold.errors import OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.snapshot import share_prefix
from kvfold.store.events import Events, Reason
from kvfold.store.key import PAGE_LEN, Ids, Key, common_len
from kvfold.store.tiers.base import Clock, Tier, check_limit
from kvfold.store.tiers.eviction import Evictor, Lease


class DeviceTier(Tier[SequenceCache, SequenceCache]):
    """At most `limit_bytes` of KV pages, including pages shared with running sequences."""

    name = "device"

    def __init__(self, limit_bytes: int, *, clock: Clock = time.time) -> None:
        check_limit(self.name, limit_bytes)
        self.events = Events()
        self._clock = clock
        self._evictor = Evictor(limit_bytes)
        self._held: dict[Key, SequenceCache] = {}
        self._served: dict[Key, Sequence[Key]] = {}  # the key of a sequence -> all that it can serve
        self._holders: dict[Key, list[Key]] = {}  # every key that can be served -> the keys of its sequences
        self._ids: dict[Key, Ids] = {}  # the key of a lossless sequence -> its tokens

    @property
    def num_bytes(self) -> int:
        return self._evictor.total_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of cached prefixes, shared pages counted once; thread-safe."""
        held = list(self._held.values())
        segments = {id(one.spans): one for sequence in held for one in (*sequence.segments, sequence.tail)}
        return sum(one.num_bytes for one in segments.values()) + sum(sequence.block_bytes for sequence in held)

    def put(self, key: Key, value: SequenceCache, lease: Lease) -> bool:
        return self.put_chunks([key], value, lease)

    def put_chunks(
        self, keys: Sequence[Key], value: SequenceCache, lease: Lease, tokens: Sequence[int] | None = None
    ) -> bool:
        """Cache a fork of the sequence, whose length is the last key's; it serves all keys, and where its tokens are
        given every prefix of them (`longest`)."""
        key = keys[-1]
        self._drop(key, None)
        for other in self._evictor.expired(self._clock()):
            self._drop(other, "expired")
        try:
            held = value.fork()
        except OutOfPages:
            self.emit("failed", key, 0, "no_room")
            return False
        if not held.open.fill:
            held.open.release()  # it is empty, and forks allocate their own
        num_bytes = held.resident_bytes
        if num_bytes > self._evictor.limit_bytes:
            held.release()
            self.emit("failed", key, num_bytes, "no_room")
            return False
        for other in self._evictor.victims(num_bytes):
            self._drop(other, "space")
        self._held[key] = held
        self._evictor.add(key, num_bytes, lease)
        self._served[key] = keys
        if tokens is not None:
            self._ids[key] = np.array(tokens[: key.end], dtype=np.int64)
        for one in keys:
            self._holders.setdefault(one, []).append(key)
        self.emit("stored", key, num_bytes)
        return True

    def get(self, key: Key, at: float) -> SequenceCache | None:
        """A fork owned by the caller; OutOfPages if there is no memory for its unshared pages."""
        while (holder := self._holder(key)) is not None and not self._evictor.is_live(holder, self._clock()):
            self._drop(holder, "expired")
        if holder is None:
            return None
        self._evictor.touch(holder, at)
        held = self._held[holder]
        return held.fork() if key == holder else share_prefix(held, key.end)

    def longest(self, scope: str, tokens: Sequence[int]) -> tuple[Key | None, int]:
        """The key of the lossless sequence that shares the most of these tokens, and how many: all of them, all of its
        own, or whole pages."""
        for key in self._evictor.expired(self._clock()):
            self._drop(key, "expired")
        ids_N = np.array(tokens, dtype=np.int64)
        best: tuple[Key | None, int] = (None, 0)
        for key, its_N in self._ids.items():
            if key.scope == scope:
                length = common_len(ids_N, its_N)
                if length < min(len(ids_N), len(its_N)):
                    length -= length % PAGE_LEN
                best = (key, length) if length > best[1] else best
        return best

    def share(self, key: Key, num_tokens: int, at: float) -> SequenceCache:
        """The first tokens of a sequence that `longest` found, for a request that started `at`; OutOfPages."""
        self._evictor.touch(key, at)
        held = self._held[key]
        return held.fork() if num_tokens == key.end else share_prefix(held, num_tokens)

    def _holder(self, key: Key) -> Key | None:
        """The newest sequence that serves it."""
        return self._holders[key][-1] if key in self._holders else None

    def serves(self, key: Key, lease: Lease) -> bool:
        """Whether this key is cached with at least the lease's time to live, which is then refreshed."""
        record = self._evictor.get(key)
        if record is None or record.ttl_s < lease.ttl_s:
            return False
        self._evictor.touch(key, lease.at)
        return True

    def delete(self, key: Key) -> None:
        while (holder := self._holder(key)) is not None:
            self._drop(holder, None)

    def keys(self) -> Iterator[Key]:
        return iter(list(self._holders))

    def shrink(self) -> bool:
        """Evict the least valuable entry; False if there is none."""
        key = self._evictor.least_valuable()
        if key is not None:
            self._drop(key, "space")
        return key is not None

    def close(self) -> None:
        for key in list(self._held):
            self._drop(key, None)

    def _drop(self, key: Key, reason: Reason | None) -> None:
        held, record = self._held.pop(key, None), self._evictor.get(key)
        if held is None or record is None:
            return
        self._evictor.remove(key)
        self._ids.pop(key, None)
        for one in self._served.pop(key):
            self._holders[one].remove(key)
            if not self._holders[one]:
                del self._holders[one]
        held.release()
        if reason is not None:
            self.emit("evicted", key, record.num_bytes, reason)
