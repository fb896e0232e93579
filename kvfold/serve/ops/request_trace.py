"""Timestamps, token counts and outcome of one request, for its log line, traces and the dashboard, without any text.

    arrived ……… queued ……… scheduled ……… looked_up ……… first_token ……… ended ……… done
        preprocess   queue         lookup        prefill         decode     sent

Times are of `time.perf_counter`. The scheduler's thread sets `scheduled` to `ended`, the event loop the others. A
restarted job sets its times again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfold.engine.scheduling.jobs import Ended, Event, Listener, PrefillDone, SequenceStart, TextDelta
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.cache.source import PlainSource
from kvfold.serve.cache.usage import Usage

_log = logging.getLogger("kvfold.serve")
_now = time.perf_counter


class Stage(NamedTuple):
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class KeptSlots:
    """KV slots kept per layer and head, of a prompt of `num_tokens`."""

    num_tokens: int
    slots: Sequence[Sequence[int]]

    @staticmethod
    def of(sequence: SequenceCache) -> KeptSlots:
        num_open = sequence.open.committed
        slots = [[stored + num_open for stored in heads] for heads in sequence.all_stored_lens()]
        return KeptSlots(sequence.committed_len, slots)

    @property
    def share(self) -> float:
        """Of the prompt's KV entries."""
        return sum(map(sum, self.slots)) / max(self.num_tokens * sum(map(len, self.slots)), 1)


@dataclass(eq=False)
class RequestTrace:
    """`at`: seconds since 1970; `path`: the route; `end`: finish reason; `miss`: reason of a cache miss; `parent`: W3C
    traceparent."""

    id: str = ""
    method: str = ""
    path: str = ""
    at: float = field(default_factory=time.time)
    parent: str | None = None
    tenant: str | None = None
    model: str | None = None
    status: int | None = None
    end: str | None = None
    miss: str | None = None
    why: str | None = None  # error message without client input other than field names
    usage: Usage | None = None
    num_prompt: int = 0
    num_reused: int = 0
    num_output: int = 0
    kept: KeptSlots | None = None
    is_listed: bool = False  # on the dashboard
    is_poll: bool = False  # not logged if it succeeds
    arrived: float = field(default_factory=_now)
    queued: float | None = None
    scheduled: float | None = None
    looked_up: float | None = None
    first_token: float | None = None
    ended: float | None = None
    done: float | None = None

    def queue(self, model: str, num_prompt: int) -> None:
        """Its job is queued."""
        self.model, self.num_prompt, self.queued = model, num_prompt, _now()

    def finish(self) -> None:
        """The response is sent, or the client has disconnected."""
        self.done = _now()
        if self.queued is not None and self.end is None:
            self.end = "cancelled"

    @property
    def lookup(self) -> str | None:
        """Result of the prompt-cache lookup: "hit", or the reason of the miss; None before prefill ends."""
        return None if self.first_token is None else self.miss or "hit"

    @property
    def stages(self) -> list[Stage]:
        """Completed stages, and the one in which it ended."""
        times = [self.queued, self.scheduled, self.looked_up, self.first_token, self.ended]
        last = self.ended if self.ended is not None else self.done
        found = []
        for name, start, end in zip(("queue", "lookup", "prefill", "decode"), times, times[1:], strict=False):
            until = last if end is None else end
            if start is not None and until is not None:
                found.append(Stage(name, start, until))
        return found

    @property
    def first_token_ms(self) -> float | None:
        """Time to first token (TTFT)."""
        return None if self.first_token is None else 1e3 * (self.first_token - self.arrived)

    @property
    def token_ms(self) -> float | None:
        """Mean inter-token latency; None below two tokens."""
        if self.first_token is None or self.ended is None or self.num_output < 2:
            return None
        return 1e3 * (self.ended - self.first_token) / (self.num_output - 1)

    @property
    def total_ms(self) -> float | None:
        return None if self.done is None else 1e3 * (self.done - self.arrived)

    def facts(self) -> dict[str, Any]:
        """Fields of the log line and the dashboard; absent where they do not apply."""
        found: dict[str, Any] = {"request": self.id, "tenant": self.tenant, "method": self.method, "path": self.path}
        found |= {"status": self.status, "ms": _rounded(self.total_ms), "why": self.why}
        if self.queued is not None:
            found |= {"model": self.model, "end": self.end, "tokens_in": self.num_prompt}
            found |= {"tokens_reused": self.num_reused, "tokens_out": self.num_output, "miss": self.miss}
            found |= {"first_token_ms": _rounded(self.first_token_ms), "token_ms": _rounded(self.token_ms)}
        return {name: value for name, value in found.items() if value is not None}


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 2)


class TracedSource:
    """A job's source and listener that record timestamps and results in a trace."""

    def __init__(self, source: PlainSource, listener: Listener, trace: RequestTrace) -> None:
        self._source, self._listener, self._trace = source, listener, trace

    @property
    def inner(self) -> PlainSource:
        return self._source

    def begin(self) -> SequenceStart:
        trace = self._trace
        trace.scheduled = _now()
        found = self._source.begin()
        trace.looked_up = _now()
        return found

    def lost(self) -> None:
        self._source.lost()

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        self._source.reached(sequence, num_read)
        if num_read == self._trace.num_prompt:
            self._trace.kept = KeptSlots.of(sequence)

    def began(self) -> None:
        self._source.began()
        trace = self._trace
        trace.miss, trace.usage, trace.first_token = self._source.miss, self._source.usage, _now()

    def listen(self, event: Event) -> None:
        trace = self._trace
        if isinstance(event, PrefillDone):
            trace.num_reused = event.num_reused
        elif isinstance(event, TextDelta):
            trace.num_output += 1  # a token or more; the end says how many
        elif isinstance(event, Ended):
            trace.end, trace.num_output, trace.ended = event.reason, event.num_tokens, _now()
        self._listener(event)


def log_request(trace: RequestTrace) -> None:
    _log.info("answered", extra={"facts": trace.facts()})
