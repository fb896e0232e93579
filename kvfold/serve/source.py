"""Where a request's sequence begins: with the longest prefix that was cached, if there is one and its tensors are.

Works in the scheduler's thread. What the contract counts as read ends at a marker; where tensors are stored in chunks,
the part behind the last whole one may be lost alone, and is then computed and stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfold.engine.jobs import Begin
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.bill import Bill, bill
from kvfold.serve.entries import Miss
from kvfold.serve.plan import Place, Plan
from kvfold.serve.shelf import Shelf

MOST_LOST = 3  # times that a request begins with a prefix which is lost on its way; then it is read without the store
NewSequence = Callable[[], SequenceCache]


class PlainSource:
    """Begins with nothing and caches nothing."""

    def __init__(self, new_sequence: NewSequence, num_tokens: int, miss: Miss = "unmarked") -> None:
        self._new_sequence = new_sequence
        self.bill = Bill(0, 0, 0, num_tokens)
        self.miss: Miss | None = miss

    def prefetch(self) -> None:
        """Nothing is asked for."""

    def begin(self) -> Begin:
        return Begin(self._new_sequence())

    def lost(self) -> None:
        """There is nothing to lose."""

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        """Nothing is kept."""

    def began(self) -> None:
        """Nothing is written."""


class CachedSource:
    """Begins where the plan finds something, for a request that started `at`."""

    def __init__(self, shelf: Shelf, tokens: Sequence[int], plan: Plan, at: float, clock: Callable[[], float]) -> None:
        self._shelf, self._tokens, self._plan, self._at, self._clock = shelf, tokens, plan, at, clock
        self._num_hit = self._num_lost = 0
        self.miss: Miss | None = None
        self.bill = Bill(0, 0, 0, len(tokens))

    def prefetch(self) -> None:
        """Have what `begin` may ask for on its way to the host; called before that, by whoever puts this in line."""
        ends = [place.end for place in (*self._plan.candidates, *(mark.place for mark in self._plan.marks))]
        self._shelf.prefixes.prefetch(self._tokens, markers=ends, at=self._at)

    def begin(self) -> Begin:
        self._num_hit, self.miss = 0, "absent"
        if self._num_lost < MOST_LOST:
            found = next(filter(None, map(self._open, self._plan.candidates)), None) or self._stored()
        else:
            found, self.miss = Begin(self._shelf.prefixes.empty()), "lost"
        self.bill = bill(len(self._tokens), self._num_hit, self._plan.marks)
        return Begin(found.sequence, found.num_read, [mark.place.end for mark in self._plan.marks])

    def lost(self) -> None:
        self._num_lost += 1

    def _open(self, place: Place) -> Begin | None:
        """The sequence that an entry stands for; an entry whose tensors are gone is forgotten."""
        shelf, prefixes = self._shelf, self._shelf.prefixes
        missed = shelf.look(place, self._at, self._clock())
        if missed is not None:
            self.miss = "expired" if "expired" in (missed, self.miss) else self.miss
            return None
        hit = prefixes.lookup(self._tokens, markers=[place.end], at=self._at, wait=False)
        chunk_len = prefixes.binding.chunk_len if prefixes.has_chunks else 1
        if hit.matched_tokens < place.end - place.end % chunk_len:
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
        ends = [mark.place.end for mark in self._plan.marks]
        hit = self._shelf.prefixes.lookup(self._tokens, markers=ends, at=self._at, wait=False)
        return Begin(hit.sequence, hit.matched_tokens)

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        for mark in self._plan.marks:
            if mark.place.end == num_read:
                self._shelf.prefixes.save(sequence, self._tokens, upto=num_read, ttl=mark.ttl_s, at=self._at)

    def began(self) -> None:
        """From now on others can read what this request wrote."""
        for mark in self._plan.marks:
            if mark.place.end > self._num_hit:
                self._shelf.write(mark, self._at)
