"""Speculative decoding by n-gram lookup (prompt lookup): drafts are what followed the last tokens earlier in the text.

Drafts come from the original token ids, also of tokens evicted from the KV cache; a pass over the cache verifies them.
Draft length = match length x recent acceptance rate: in a copied passage it doubles with every pass, and weak matches
are not drafted while acceptance is low (SuffixDecoding, arXiv:2411.04975, bounds a draft by its match; fixed lengths
waste work where acceptance is low).

Acceptance: sample from the model's distribution p as usual, and accept the draft while the two agree. So a drafted x is
accepted with probability p(x), and its replacement is distributed as p without x, renormalised: the rejection rule of
Leviathan et al. (arXiv:2211.17192) for a deterministic draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvfold.errors import InputError

_BREAK = -1  # between texts that do not follow each other; no token has this id
_MAX_COMPARED = 16  # occurrences in one search, the latest first
_MAX_MATCH = 64  # tokens compared at one occurrence


class Match(NamedTuple):
    source: int  # where the continuation begins
    length: int  # tokens before it that equal the end of the history


class NgramIndex:
    """Token ids in order, and the chain of earlier occurrences of each bigram (hash chains, as in Lempel-Ziv coders):
    adding a token is O(1), and a search compares at most 16 occurrences backwards.

        history   … a b c d e f … x b c d        the last three tokens occurred before: match 3, continued by e f …
                          ^ source
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # bigram: index behind its latest occurrence
        self._before: list[int | None] = []  # by index behind a bigram: the occurrence before it
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def end_text(self) -> None:
        """Tokens added next belong to another text: no match or continuation crosses this point."""
        self.add(_BREAK)

    def add(self, token: int) -> None:
        last = self._tokens[-1] if self._tokens else _BREAK
        self._tokens.append(token)
        if _BREAK in (last, token):
            self._before.append(None)
        else:
            self._before.append(self._latest.get((last, token)))
            self._latest[last, token] = len(self._tokens)

    def find(self) -> Match | None:
        """The longest match of the end of the history; of equal lengths, the latest."""
        best: Match | None = None
        place = self._before[-1] if self._before else None
        for _ in range(_MAX_COMPARED):
            if place is None:
                break
            length = self._match_len(place)
            if best is None or length > best.length:
                best = Match(place, length)
            place = self._before[place - 1]
        return best

    def _match_len(self, place: int) -> int:
        """How many tokens before `place` equal those at the end of the history."""
        tokens, end, length = self._tokens, len(self._tokens), 2
        most = min(place, _MAX_MATCH)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length] != _BREAK:
            length += 1
        return length

    def continuation(self, source: int, num_tokens: int) -> list[int]:
        """The tokens from `source` on, up to the end of that text; past the end of the history they repeat."""
        found: list[int] = []
        period = len(self._tokens) - source
        for i in range(num_tokens):
            token = self._tokens[source + i] if i < period else found[i - period]
            if token == _BREAK:
                break
            found.append(token)
        return found


MOST_DRAFTED = 16
_MEMORY = 8  # drafts: horizon of the moving average of the acceptance rate
_LEAST_RATE = 1 / 8  # so that the rate can recover


class Drafter:
    """The draft model of one request: an n-gram index over its text."""

    def __init__(
        self,
        tokens: Iterable[int],
        most_drafted: int = MOST_DRAFTED,
        *,
        earlier: Iterable[Sequence[int]] = (),
        never: frozenset[int] = frozenset(),
    ) -> None:
        """`earlier`: outputs of other requests to draft from too; `never`: tokens that end a draft."""
        self.most_drafted = most_drafted
        self.rate = 1.0
        self._never = never
        self._index = NgramIndex()
        for output in earlier:
            self._index.extend(output)
            self._index.end_text()
        self._index.extend(tokens)

    def add(self, token: int) -> None:
        """Append a sampled token."""
        self._index.add(token)

    def draft(self, most: int) -> list[int]:
        """At most `most` draft tokens; often none."""
        match = self._index.find() if most > 0 else None
        if match is None:
            return []
        length = min(int(match.length * self.rate), self.most_drafted, most)
        return list(takewhile(lambda token: token not in self._never, self._index.continuation(match.source, length)))

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Update the acceptance rate."""
        self.rate += (num_accepted / num_drafted - self.rate) / _MEMORY
        self.rate = max(self.rate, _LEAST_RATE)


def check_speculation(speculate: bool | int, draft_from: Sequence[Sequence[int]]) -> None:
    """InputError for values that do not mean anything."""
    if not isinstance(speculate, int) or (speculate is not False and speculate < 1):
        raise InputError(f"speculate is {speculate!r}; write True, False, or how many tokens to draft, at least 1")
    if draft_from and not speculate:
        raise InputError("draft_from names outputs to draft from, but speculate is off; give speculate=True too")


def make_drafter(
    tokens: Iterable[int], speculate: bool | int, draft_from: Sequence[Sequence[int]], never: frozenset[int]
) -> Drafter | None:
    """As users ask for it: True drafts up to MOST_DRAFTED tokens, a number up to so many, False none."""
    if speculate is False:
        return None
    return Drafter(tokens, MOST_DRAFTED if speculate is True else speculate, earlier=draft_from, never=never)
