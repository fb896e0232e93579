"""A request's initial KV cache: the longest cached prefix whose tensors are stored, else an empty sequence.

Runs in the scheduler's thread. Usage counts up to a marker. Where tensors are stored in chunks, the partial chunk after
the last whole one may be evicted alone, and is then recomputed and stored again. Under a lossy policy tensors end at
the last compression point at or before the marker, and the tokens in between are always recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvfold.engine.scheduling.jobs import SequenceStart
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.cache.breakpoints import Boundary, CachePlan
from kvfold.serve.cache.prompt_cache import Miss, PromptCache
from kvfold.serve.cache.usage import Usage, usage_of
from kvfold.store.prefixes import Hit

MOST_LOST = 3  # lookups of one request that end in PrefixLost; then its prompt is computed without the store
NewSequence = Callable[[], SequenceCache]


class PlainSource:
    """Starts empty and caches nothing; the prompt is compressed at `points`, or with None at its end."""

    def __init__(
        self, new_sequence: NewSequence, num_tokens: int, miss: Miss = "unmarked", points: Sequence[int] | None = None
    ) -> None:
        self._new_sequence = new_sequence
        self._points = points
        self.usage = Usage(0, 0, 0, num_tokens)
        self.miss: Miss | None = miss

    def prefetch(self) -> None:
        """No lookup follows."""

    def begin(self) -> SequenceStart:
        return SequenceStart(self._new_sequence(), 0, self._points)

    def lost(self) -> None:
        """Cannot happen."""

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        """Nothing is saved."""

    def began(self) -> None:
        """Nothing is written."""


class CachedSource:
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
        self._cache, self._tokens, self._plan, self._at, self._clock = cache, tokens, plan, at, clock
        self._points = points
        self._num_hit = self._num_lost = 0
        self.miss: Miss | None = None
        self.usage = Usage(0, 0, 0, len(tokens))

    def prefetch(self) -> None:
        """Copy what `begin` may look up to the fastest tier in the background, while the request is queued."""
        boundaries = [*self._plan.candidates, *(write.boundary for write in self._plan.writes)]
        ends = list(map(self._stored_end, boundaries))
        self._cache.prefixes.prefetch(self._tokens, markers=ends, cuts=self._points, at=self._at)

    def begin(self) -> SequenceStart:
        self._num_hit, self.miss = 0, "absent"
        if self._num_lost < MOST_LOST:
            found = next(filter(None, map(self._open, self._plan.candidates)), None) or self._stored()
        else:
            found, self.miss = SequenceStart(self._cache.prefixes.empty()), "lost"
        self.usage = usage_of(len(self._tokens), self._num_hit, self._plan.writes)
        if self._points is None:
            return replace(found, cuts=self._write_ends)
        self.reached(found.sequence, found.num_read)  # another marker may extend its time to live
        return replace(found, cuts=self._points)

    @property
    def _write_ends(self) -> list[int]:
        """Where the tensors of this request's entries end."""
        return [self._stored_end(write.boundary) for write in self._plan.writes]

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
        if hit.matched_tokens < (end - end % prefixes.binding.chunk_len if prefixes.has_chunks else end):
            hit.sequence.release()
            cache.delete(boundary)
            self.miss = "lost"
            return None
        cache.touch(boundary, self._at)
        self._num_hit, self.miss = boundary.end, None
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
