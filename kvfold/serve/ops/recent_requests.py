"""The latest requests of one tenant, what all of them came to, and percentiles of their times.

Percentiles are exact, over a bounded window. Used by the server's loop alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from kvfold.serve.cache.usage import Price
from kvfold.serve.ops.request_trace import Trail

NUM_LISTED = 64
NUM_TIMED = 512


class Percentiles(NamedTuple):
    """By nearest rank, so each is a value that was measured."""

    num_samples: int
    p50: float
    p95: float
    p99: float


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None without values."""
    found = sorted(values)
    if not found:
        return None
    ranks = (math.ceil(share * len(found) / 100) for share in (50, 95, 99))
    return Percentiles(len(found), *(found[rank - 1] for rank in ranks))


class Recent:
    """Dollars are counted only where there is a `price`."""

    def __init__(self, price: Price | None = None, *, num_listed: int = NUM_LISTED, num_timed: int = NUM_TIMED) -> None:
        self.price = price
        self.num_done = self.num_refused = 0
        self.tokens: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()
        self.cost_usd = self.saved_usd = 0.0
        self.first_token_ms: deque[float] = deque(maxlen=num_timed)
        self.token_ms: deque[float] = deque(maxlen=num_timed)
        self._listed: deque[Trail] = deque(maxlen=num_listed)

    def enter(self, trail: Trail) -> None:
        """A request has come; it is listed from now on."""
        self._listed.append(trail)

    def leave(self, trail: Trail) -> None:
        """It is over."""
        if trail.status is not None and trail.status >= 400:
            self.num_refused += 1
        else:
            self.num_done += 1
        if trail.lookup is not None and trail.bill is not None:
            self.lookups[trail.lookup] += 1
            self.tokens += Counter(input=trail.num_prompt, reused=trail.num_reused, output=trail.num_output)
            if self.price is not None:
                self.cost_usd += self.price.cost(trail.bill, trail.num_output)
                self.saved_usd += self.price.saved(trail.bill)
        if trail.first_token_ms is not None:
            self.first_token_ms.append(trail.first_token_ms)
        if trail.token_ms is not None:
            self.token_ms.append(trail.token_ms)

    def listed(self) -> list[Trail]:
        """The latest first."""
        return list(reversed(self._listed))

    def find(self, request_id: str) -> Trail | None:
        return next((trail for trail in self._listed if trail.id == request_id), None)
