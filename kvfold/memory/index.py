"""The facts of one owner in memory: words for BM25, vectors for cosines, dates for validity.

It follows the file: what any process wrote since is added, and a removal reads everything anew.

    N facts   D dimensions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvfold.memory.embedding import identity
from kvfold.memory.fact import Fact, Owner
from kvfold.memory.fact_words import FactWords
from kvfold.memory.store import FactStore
from kvfold.shortening.base import Bools, Embedder, Floats
from kvfold.shortening.embedders.codes import cosines

_MAX_CHAIN = 64  # values that one fact had before


@dataclass
class FactIndex:
    """Facts by id, as the store had them when `refresh` was called last."""

    store: FactStore
    owner: Owner
    embedder: Embedder
    facts: list[Fact] = field(default_factory=list)
    words: FactWords = field(default_factory=FactWords.empty)
    recalls: int = 0
    _codes_ND: NDArray[np.int8] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int8))
    importance_N: Floats = field(default_factory=lambda: np.zeros(0))
    _from_N: Floats = field(default_factory=lambda: np.zeros(0))
    _to_N: Floats = field(default_factory=lambda: np.zeros(0))
    _before_N: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # rows; -1: none
    _row_of: dict[int, int] = field(default_factory=dict)
    _seen: tuple[int, int, int] = (0, 0, 0)  # key, epoch, revision

    def refresh(self) -> None:
        """Read what changed."""
        version = self.store.version(self.owner)
        if version is None:
            self._clear()
            return
        if self._seen[:2] != version[:2]:
            self._clear()
        self.recalls = version.recalls
        if self._seen[2] < version.revision:
            found = self.store.changed(self.owner, version.key, self._seen[2])
            known = [fact for fact in found if fact.id in self._row_of]
            self._append([fact for fact in found if fact.id not in self._row_of])
            self._update(known)
        self._seen = version.key, version.epoch, version.revision

    def fact(self, number: int) -> Fact | None:
        row = self._row_of.get(number)
        return None if row is None else self.facts[row]

    def __len__(self) -> int:
        return len(self.facts)

    def valid_N(self, at: float, since: float | None = None) -> Bools:
        """Facts that were valid at a time, or at any from `since` to it."""
        return (self._from_N <= at) & ((at if since is None else min(at, since)) < self._to_N)

    def age_N(self, at: float) -> Floats:
        """Seconds since each fact became valid; 0 for those of the future."""
        return np.maximum(0.0, at - self._from_N)

    def cosine_N(self, code_D: NDArray[np.int8]) -> Floats:
        if not self.facts:
            return np.zeros(0)
        return cosines(self._codes_ND, code_D[None])[:, 0]

    def inherited_N(self, value_N: Floats) -> Floats:
        """The highest of each fact and of those it superseded: who asks where Anna lives finds that she moved."""
        for _ in range(_MAX_CHAIN):
            higher_N = np.where(self._before_N >= 0, np.maximum(value_N, value_N[self._before_N]), value_N)
            if np.array_equal(higher_N, value_N):
                break
            value_N = higher_N
        return value_N

    def _clear(self) -> None:
        fresh = FactIndex(self.store, self.owner, self.embedder)
        self.__dict__.update(fresh.__dict__)

    def _update(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            row = self._row_of[fact.id]
            self.facts[row] = replace(fact, embedding=self.facts[row].embedding)
            self._from_N[row], self._to_N[row], self._before_N[row] = fact.valid_from, _end(fact), self._before(fact)

    def _append(self, facts: Sequence[Fact]) -> None:
        if not facts:
            return
        for fact in facts:
            self._row_of[fact.id] = len(self.facts)
            self.facts.append(fact)
        self.words = self.words.with_texts([fact.text for fact in facts])
        codes = self._codes(facts)
        self._codes_ND = np.concatenate([self._codes_ND, codes]) if len(self._codes_ND) else codes
        self.importance_N = np.append(self.importance_N, [fact.importance for fact in facts])
        self._from_N = np.append(self._from_N, [fact.valid_from for fact in facts])
        self._to_N = np.append(self._to_N, [_end(fact) for fact in facts])
        self._before_N = np.append(self._before_N, [self._before(fact) for fact in facts])

    def _before(self, fact: Fact) -> int:
        return -1 if fact.supersedes is None else self._row_of.get(fact.supersedes, -1)

    def _codes(self, facts: Sequence[Fact]) -> NDArray[np.int8]:
        """[N, D]: kept vectors; those of another embedder, or of a wrong size, are made anew."""
        mine, size = identity(self.embedder), self.embedder.codes([""]).shape[1]
        codes = np.zeros((len(facts), size), dtype=np.int8)
        anew = [row for row, fact in enumerate(facts) if fact.embedder != mine or len(fact.embedding) != size]
        if anew:
            codes[anew] = self.embedder.codes([facts[row].text for row in anew])
        for row in sorted(set(range(len(facts))) - set(anew)):
            codes[row] = np.frombuffer(facts[row].embedding, dtype=np.int8)
        return codes


def _end(fact: Fact) -> float:
    return np.inf if fact.valid_to is None else fact.valid_to
