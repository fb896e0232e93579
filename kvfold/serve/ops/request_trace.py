"""What is noted of one request on its way, for logs, traces and the dashboard. Nothing of its text is among it.

    came ……… queued ……… let_in ……… looked_up ……… began ……… ended ……… done
       read     queue       lookup       prefill      decode      sent

Times are of `time.perf_counter`. The scheduler's thread sets those from `let_in` to `ended`, the server's loop the
others. A job that has to start anew sets its times again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfold.engine.jobs import Begin, Ended, Event, Listener
from kvfold.pages.sequence import SequenceCache
from kvfold.serve.cache.source import CachedSource, PlainSource
from kvfold.serve.cache.usage import Bill

_now = time.perf_counter


class Stage(NamedTuple):
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Kept:
    """Slots by layer and head, of a prompt of `num_tokens`."""

    num_tokens: int
    slots: Sequence[Sequence[int]]

    @staticmethod
    def of(sequence: SequenceCache) -> Kept:
        num_open, layers = sequence.open.committed, range(sequence.spec.num_layers)
        slots = [[stored + num_open for stored in sequence.stored_lens(layer)] for layer in layers]
        return Kept(sequence.committed_len, slots)


@dataclass(eq=False)
class Trail:
    """`at` is in seconds since 1970, `path` the route's; `end` says how a reply ended; `parent` is a traceparent."""

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
    why: str | None = None  # it was refused, or failed; of what the client sent it tells names of fields at most
    bill: Bill | None = None
    num_prompt: int = 0
    num_reused: int = 0
    num_output: int = 0
    kept: Kept | None = None
    is_listed: bool = False  # on the dashboard
    came: float = field(default_factory=_now)
    queued: float | None = None
    let_in: float | None = None
    looked_up: float | None = None
    began: float | None = None
    ended: float | None = None
    done: float | None = None

    def queue(self, model: str, num_prompt: int) -> None:
        """A job for it waits from now on."""
        self.model, self.num_prompt, self.queued = model, num_prompt, _now()

    def finish(self) -> None:
        """All is sent, or nobody is there to read it."""
        self.done = _now()
        if self.queued is not None and self.end is None:
            self.end = "cancelled"

    @property
    def lookup(self) -> str | None:
        """What the prompt cache had: "hit", or why nothing; None before the reply begins."""
        return None if self.began is None else self.miss or "hit"

    @property
    def stages(self) -> list[Stage]:
        """Those that it has come through, and the one in which it ended."""
        times = [self.queued, self.let_in, self.looked_up, self.began, self.ended]
        last = self.ended if self.ended is not None else self.done
        found = []
        for name, start, end in zip(("queue", "lookup", "prefill", "decode"), times, times[1:], strict=False):
            until = last if end is None else end
            if start is not None and until is not None:
                found.append(Stage(name, start, until))
        return found

    @property
    def first_token_ms(self) -> float | None:
        return None if self.began is None else 1e3 * (self.began - self.came)

    @property
    def token_ms(self) -> float | None:
        """Between two tokens, on average; None where there are no two."""
        if self.began is None or self.ended is None or self.num_output < 2:
            return None
        return 1e3 * (self.ended - self.began) / (self.num_output - 1)

    @property
    def total_ms(self) -> float | None:
        return None if self.done is None else 1e3 * (self.done - self.came)

    def facts(self) -> dict[str, Any]:
        """For people and their tools; what does not apply is left out."""
        found: dict[str, Any] = {"request": self.id, "tenant": self.tenant, "method": self.method, "path": self.path}
        found |= {"status": self.status, "ms": _rounded(self.total_ms), "why": self.why}
        if self.queued is not None:
            found |= {"model": self.model, "end": self.end, "tokens_in": self.num_prompt}
            found |= {"tokens_reused": self.num_reused, "tokens_out": self.num_output, "miss": self.miss}
            found |= {"first_token_ms": _rounded(self.first_token_ms), "token_ms": _rounded(self.token_ms)}
        return {name: value for name, value in found.items() if value is not None}


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 2)


class Watched:
    """A source and a listener of which a trail takes note."""

    def __init__(self, source: CachedSource | PlainSource, listener: Listener, trail: Trail) -> None:
        self._source, self._listener, self._trail = source, listener, trail

    def begin(self) -> Begin:
        trail = self._trail
        trail.let_in = _now()
        found = self._source.begin()
        trail.looked_up, trail.num_reused = _now(), found.num_read
        return found

    def lost(self) -> None:
        self._source.lost()

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        self._source.reached(sequence, num_read)
        if num_read == self._trail.num_prompt:
            self._trail.kept = Kept.of(sequence)

    def began(self) -> None:
        self._source.began()
        trail = self._trail
        trail.miss, trail.bill, trail.began = self._source.miss, self._source.bill, _now()

    def listen(self, event: Event) -> None:
        if isinstance(event, Ended):
            trail = self._trail
            trail.end, trail.num_output, trail.ended = event.reason, event.num_tokens, _now()
        self._listener(event)
