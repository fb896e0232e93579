"""Recent requests of one tenant, totals over all of them, their history, and percentiles of TTFT and ITL.

Percentiles are exact, over a bounded window. Used by the event loop only.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from kvfold.serve.api.strict_json import Json
from kvfold.serve.cache.usage import Price
from kvfold.serve.ops.request_trace import RequestTrace

NUM_LISTED = 64
NUM_TIMED = 512
SAMPLE_S, NUM_SAMPLES = 5.0, 120  # the history: ten minutes


def percentiles(values: Iterable[float]) -> Json | None:
    """`num_samples`, `p50`, `p95` and `p99`, by nearest rank, so each is a measured value; None without values."""
    found = sorted(values)
    if not found:
        return None
    at = {f"p{share}": found[math.ceil(share * len(found) / 100) - 1] for share in (50, 95, 99)}
    return {"num_samples": len(found), **at}


class Sample(NamedTuple):
    """Load of the server, and the tenant's totals since the start: generated tokens, cache hits and lookups."""

    at: float  # seconds since 1970
    running: int
    waiting: int
    output: int
    hits: int
    lookups: int


class RecentRequests:
    """Costs are counted only with a `price`."""

    def __init__(self, price: Price | None = None, *, num_listed: int = NUM_LISTED, num_timed: int = NUM_TIMED) -> None:
        self.price = price
        self.num_done = self.num_refused = 0
        self.tokens: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()
        self.cost_usd = self.saved_usd = 0.0
        self.first_token_ms: deque[float] = deque(maxlen=num_timed)
        self.token_ms: deque[float] = deque(maxlen=num_timed)
        self.history = deque([Sample(time.time(), 0, 0, 0, 0, 0)], maxlen=NUM_SAMPLES)
        self._listed: deque[RequestTrace] = deque(maxlen=num_listed)

    def add(self, trace: RequestTrace) -> None:
        """List a request that has arrived."""
        self._listed.append(trace)

    def finish(self, trace: RequestTrace) -> None:
        """Count a request that has ended."""
        if trace.status is not None and trace.status >= 400:
            self.num_refused += 1
        else:
            self.num_done += 1
        if trace.lookup is not None and trace.usage is not None:
            self.lookups[trace.lookup] += 1
            self.tokens += Counter(input=trace.num_prompt, reused=trace.num_reused, output=trace.num_output)
            if self.price is not None:
                self.cost_usd += self.price.cost(trace.usage, trace.num_output)
                self.saved_usd += self.price.saved(trace.usage)
        if trace.first_token_ms is not None:
            self.first_token_ms.append(trace.first_token_ms)
        if trace.token_ms is not None:
            self.token_ms.append(trace.token_ms)

    def sample(self, running: int, waiting: int) -> Sample:
        """The present state; tokens of unfinished replies count."""
        output = self.tokens["output"] + sum(trace.num_output for trace in self._listed if trace.done is None)
        looked_up = self.lookups.total() - self.lookups["unmarked"] - self.lookups["refused"]
        return Sample(time.time(), running, waiting, output, self.lookups["hit"], looked_up)

    def listed(self) -> list[RequestTrace]:
        """Newest first."""
        return list(reversed(self._listed))

    def find(self, request_id: str) -> RequestTrace | None:
        return next((trace for trace in self._listed if trace.id == request_id), None)
