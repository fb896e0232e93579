"""Where a request's sequence begins: with the longest prefix that was cached, if there is one and its tensors are.

Works in the scheduler's thread. What the contract counts as read ends at a marker. Where tensors are stored in chunks,
the part behind the last whole one may be lost alone, and is then computed and stored again. Where a policy compresses,
tensors end at the last point at or before the marker, and what lies between is always computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvfold.engine.jobs import Begin
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.cache.cache_breakpoints import Place, Plan
from kvfold.serve.cache.entries import Miss
from kvfold.serve.cache.prompt_cache import Shelf
from kvfold.serve.cache.usage import Bill, bill
from kvfold.store.prefixes import Hit

MOST_LOST = 3  # times that a request begins with a prefix which is lost on its way; then it is read without the store
NewSequence = Callable[[], SequenceCache]


class PlainSource:
    """Begins with nothing and caches nothing; the prompt is compressed at `points`, or with None at its end."""

    def __init__(
        self, new_sequence: NewSequence, num_tokens: int, miss: Miss = "unmarked", points: Sequence[int] | None = None
    ) -> None:
        self._new_sequence = new_sequence
        self._points = points
        self.bill = Bill(0, 0, 0, num_tokens)
        self.miss: Miss | None = miss

    def prefetch(self) -> None:
        """Nothing is asked for."""

    def begin(self) -> Begin:
        return Begin(self._new_sequence(), 0, self._points)

    def lost(self) -> None:
        """There is nothing to lose."""

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        """Nothing is kept."""

    def began(self) -> None:
        """Nothing is written."""


class CachedSource:
    """Begins where the plan finds something, for a request that started `at`. A policy that compresses does so at
    `points`; None: tensors are stored in chunks, and up to markers."""

    def __init__(
        self,
        shelf: Shelf,
        tokens: Sequence[int],
        plan: Plan,
        at: float,
        clock: Callable[[], float],
        points: Sequence[int] | None = None,
    ) -> None:
        self._shelf, self._tokens, self._plan, self._at, self._clock = shelf, tokens, plan, at, clock
        self._points = points
        self._num_hit = self._num_lost = 0
        self.miss: Miss | None = None
        self.bill = Bill(0, 0, 0, len(tokens))

    def prefetch(self) -> None:
        """Have what `begin` may ask for on its way to the host; called before that, by whoever puts this in line."""
        places = [*self._plan.candidates, *(mark.place for mark in self._plan.marks)]
        ends = list(map(self._stored_end, places))
        self._shelf.prefixes.prefetch(self._tokens, markers=ends, cuts=self._points, at=self._at)

    def begin(self) -> Begin:
        self._num_hit, self.miss = 0, "absent"
        if self._num_lost < MOST_LOST:
            found = next(filter(None, map(self._open, self._plan.candidates)), None) or self._stored()
        else:
            found, self.miss = Begin(self._shelf.prefixes.empty()), "lost"
        self.bill = bill(len(self._tokens), self._num_hit, self._plan.marks)
        if self._points is None:
            return replace(found, cuts=self._mark_ends)
        self.reached(found.sequence, found.num_read)  # another marker may have it live longer
        return replace(found, cuts=self._points)

    @property
    def _mark_ends(self) -> list[int]:
        """Where what this request marks is stored."""
        return [self._stored_end(mark.place) for mark in self._plan.marks]

    def _stored_end(self, place: Place) -> int:
        """Where the tensors of an entry end; 0: it has none."""
        if self._points is None:
            return place.end
        return max((point for point in self._points if point <= place.end), default=0)

    def lost(self) -> None:
        self._num_lost += 1

    def _open(self, place: Place) -> Begin | None:
        """The sequence that an entry stands for; an entry whose tensors are gone is forgotten."""
        shelf, prefixes = self._shelf, self._shelf.prefixes
        missed = shelf.look(place, self._at, self._clock())
        if missed is not None:
            self.miss = "expired" if "expired" in (missed, self.miss) else self.miss
            return None
        hit, end = self._lookup([self._stored_end(place)]), self._stored_end(place)
        if hit.matched_tokens < (end - end % prefixes.binding.chunk_len if prefixes.has_chunks else end):
            hit.sequence.release()
            shelf.forget(place)
            self.miss = "lost"
            return None
        shelf.use(place, self._at)
        self._num_hit, self.miss = place.end, None
        return Begin(hit.sequence, hit.matched_tokens)

    def _stored(self) -> Begin:
        """Tensors that happen to be there, of requests whose reply has not begun: they save work, and this request pays
        for its entries all the same."""
        hit = self._lookup(self._mark_ends)
        return Begin(hit.sequence, hit.matched_tokens)

    def _lookup(self, ends: Sequence[int]) -> Hit:
        return self._shelf.prefixes.lookup(self._tokens, markers=ends, cuts=self._points, at=self._at, wait=False)

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        prefixes, cuts = self._shelf.prefixes, self._points or ()
        for mark, end in zip(self._plan.marks, self._mark_ends, strict=True):
            if 0 < end == num_read:
                prefixes.save(sequence, self._tokens, upto=num_read, cuts=cuts, ttl=mark.ttl_s, at=self._at)

    def began(self) -> None:
        """From now on others can read what this request wrote."""
        for mark in self._plan.marks:
            if mark.place.end > self._num_hit:
                self._shelf.write(mark, self._at)
