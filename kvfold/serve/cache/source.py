"""The prompt cache, and the source of a request's initial KV cache: the longest cached prefix whose tensors are stored,
else an empty sequence.

Runs in the scheduler's thread. Usage counts as read what is reused, up to a marker. Where tensors are stored in chunks,
the partial chunk after the last whole one may be evicted alone, and is then recomputed and stored again. Under a lossy
policy tensors end at the last compression point at or before the marker, and the tokens in between are always
recomputed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvfold.engine.scheduling.jobs import SequenceStart
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.cache.breakpoints import Boundary, CachePlan, CacheWrite
from kvfold.serve.cache.usage import Usage, usage_of
from kvfold.store.markers import CacheMarkers, Marker
from kvfold.store.prefixes import Hit, Prefixes

MOST_LOST = 3  # lookups of one request that end in PrefixLost; then its prompt is computed without the store
NewSequence = Callable[[], SequenceCache]
MAX_ENTRIES = 1 << 16
Miss = Literal["absent", "expired", "lost", "unmarked", "refused"]


@dataclass
class Entry:
    ttl_s: float
    used_at: float

    def is_live(self, now: float) -> bool:
        return now < self.used_at + self.ttl_s


class Entries:
    """Time to live and last use by prefix digest, LRU-bounded: the API's view of the cache, without tensors.

    Times are request *start* times, so a reply that takes four minutes leaves one minute of five. An entry is written
    when prefill ends; concurrent requests with the same prefix each write their own.
    """

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


class PromptCache:
    """One tenant's entries and the stored KV prefixes they refer to. Entries are indexed in this process and written in
    the background as markers to the tiers of the prefix store, where the next process or another server finds them."""

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


class PlainSource:
    """Starts empty and saves nothing; the prompt is compressed at `points`, or with None at its end."""

    def __init__(
        self, new_sequence: NewSequence, num_tokens: int, miss: Miss = "unmarked", points: Sequence[int] | None = None
    ) -> None:
        self._new_sequence, self._points = new_sequence, points
        self.usage = Usage(0, 0, 0, num_tokens)
        self.miss: Miss | None = miss

    def begin(self) -> SequenceStart:
        return SequenceStart(self._new_sequence(), 0, self._points)

    @property
    def saved(self) -> Collection[tuple[int, ...]]:
        """The compression points up to each prefix that this source saves under a lossy policy."""
        return ()

    def prefetch(self) -> None: ...
    def lost(self) -> None: ...
    def reached(self, sequence: SequenceCache, num_read: int) -> None: ...
    def began(self) -> None: ...


class CachedSource(PlainSource):
    """Starts with the first hit among the plan's candidates, for a request that started `at`. `points`: compression
    points of a lossy policy; None: tensors are stored in chunks up to markers."""

    def __init__(
        self,
        cache: PromptCache,
        tokens: Sequence[int],
        plan: CachePlan,
        at: float,
        clock: Callable[[], float],
        points: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cache.prefixes.empty, len(tokens), "absent", points)
        self._cache, self._tokens, self._plan, self._at, self._clock = cache, tokens, plan, at, clock
        self._num_hit = self._num_reused = self._num_lost = 0

    def prefetch(self) -> None:
        """Copy what `begin` may look up to the fastest tier in the background, while the request is queued."""
        boundaries = [*self._plan.candidates, *(write.boundary for write in self._plan.writes)]
        ends = list(map(self._stored_end, boundaries))
        self._cache.prefixes.prefetch(self._tokens, markers=ends, cuts=self._points, at=self._at)

    def begin(self) -> SequenceStart:
        self._num_hit, self._num_reused, self.miss = 0, 0, "absent"
        if self._num_lost < MOST_LOST:
            found = next(filter(None, map(self._open, self._plan.candidates)), None) or self._stored()
        else:
            found, self.miss = SequenceStart(self._new_sequence()), "lost"
        self.usage = usage_of(len(self._tokens), self._num_hit, self._plan.writes, self._num_reused)
        if self._points is None:
            return replace(found, cuts=self._write_ends)
        self.reached(found.sequence, found.num_read)  # another marker may extend its time to live
        return replace(found, cuts=self._points)

    @property
    def _write_ends(self) -> list[int]:
        """Where the tensors of this request's entries end."""
        return [self._stored_end(write.boundary) for write in self._plan.writes]

    @property
    def saved(self) -> Collection[tuple[int, ...]]:
        points = self._points or ()
        return [tuple(point for point in points if point <= end) for end in self._write_ends if end in points]

    def _stored_end(self, boundary: Boundary) -> int:
        """Where the tensors of an entry at the boundary end; 0: it has none."""
        if self._points is None:
            return boundary.end
        return max((point for point in self._points if point <= boundary.end), default=0)

    def lost(self) -> None:
        self._num_lost += 1

    def _open(self, boundary: Boundary) -> SequenceStart | None:
        """The sequence of a hit; an entry whose tensors were evicted is dropped."""
        cache, prefixes = self._cache, self._cache.prefixes
        missed = cache.miss_reason(boundary, self._at, self._clock())
        if missed is not None:
            self.miss = "expired" if "expired" in (missed, self.miss) else self.miss
            return None
        hit, end = self._lookup([self._stored_end(boundary)]), self._stored_end(boundary)
        if prefixes.has_chunks:
            end = min(end, len(self._tokens) - 1)  # the last token is computed, for its logits
            end -= end % prefixes.binding.chunk_len
        if hit.matched_tokens < end:
            hit.sequence.release()
            cache.delete(boundary)
            self.miss = "lost"
            return None
        cache.touch(boundary, self._at)
        self._num_hit, self._num_reused, self.miss = boundary.end, hit.matched_tokens, None
        return SequenceStart(hit.sequence, hit.matched_tokens)

    def _stored(self) -> SequenceStart:
        """Tensors stored by concurrent requests that have no entry yet: they save prefill, and usage still counts this
        request's entries as written."""
        hit = self._lookup(self._write_ends)
        return SequenceStart(hit.sequence, hit.matched_tokens)

    def _lookup(self, ends: Sequence[int]) -> Hit:
        return self._cache.prefixes.lookup(self._tokens, markers=ends, cuts=self._points, at=self._at, wait=False)

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        prefixes, cuts = self._cache.prefixes, self._points or ()
        for write, end in zip(self._plan.writes, self._write_ends, strict=True):
            if 0 < end == num_read:
                prefixes.save(sequence, self._tokens, upto=num_read, cuts=cuts, ttl=write.ttl_s, at=self._at)

    def began(self) -> None:
        """Prefill is done: publish this request's entries."""
        for write in self._plan.writes:
            if write.boundary.end > self._num_hit:
                self._cache.write(write, self._at)
