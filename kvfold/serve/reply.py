"""A reply on its way: begins, is iterated over, and ends exactly once, also when the client goes away."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvfold.engine.jobs import Began, Ended, Event, Wrote
from kvfold.errors import KvfoldError, LogitsError
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.request import Ask
from kvfold.serve.api.tool_calls import Call, CallReader
from kvfold.serve.cache.cache_breakpoints import Plan
from kvfold.serve.cache.source import CachedSource, PlainSource
from kvfold.serve.cache.usage import Bill
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.request_trace import Trail

_log = logging.getLogger("kvfold.serve")


Planner = Callable[[Any, int], Plan]  # places and the least length -> plan


@dataclass(frozen=True)
class Start:
    """Who asks, since when; `plan_with` decides what is cached, None: nothing."""

    tenant: str
    at: float
    plan_with: Planner | None = None
    scope: str = ""  # what splits the cache further
    trail: Trail = field(default_factory=Trail)
    num_bytes: int = 0  # of its body


class Events(Protocol):
    """What a job tells, in its order."""

    async def get(self) -> Event: ...


class Reply:
    """`parts` yields texts and calls of tools; after it, `end` says how it ended."""

    def __init__(
        self,
        ask: Ask,
        start: Start,
        events: Events,
        source: CachedSource | PlainSource,
        plan: Plan,
        *,
        metrics: Metrics,
        cancel: Callable[[], None],
        timeout_s: float,
        is_cut: bool,
    ) -> None:
        self.ask, self.start, self.plan, self.is_cut = ask, start, plan, is_cut
        self.id = secrets.token_hex(12)
        self.end: Ended | None = None
        self.has_calls = False
        self._events, self._source, self._metrics, self._cancel = events, source, metrics, cancel
        self._timeout_s = timeout_s
        self._is_closed = False

    @property
    def bill(self) -> Bill:
        return self._source.bill

    @property
    def num_output(self) -> int:
        return 0 if self.end is None else self.end.num_tokens

    async def begin(self) -> None:
        """Wait until the prompt has been read."""
        try:
            event = await self._events.get()
            if isinstance(event, Ended):
                self._fail(event)
            assert isinstance(event, Began)
            self._note_start(event)
        except BaseException:
            self.close()
            raise

    async def parts(self) -> AsyncIterator[str | Call]:
        """Texts and calls as they come; ApiError if the reply is broken off."""
        reader = CallReader(self.ask.calls_tools)
        try:
            while self.end is None:
                event = await self._events.get()
                for part in self._taken(event, reader):
                    self.has_calls = self.has_calls or isinstance(part, Call)
                    yield part
        finally:
            self.close()

    def _taken(self, event: Event, reader: CallReader) -> list[str | Call]:
        if isinstance(event, Wrote):
            return reader.add(event.text)
        assert isinstance(event, Ended)
        if event.reason in ("late", "failed", "cancelled"):
            self._fail(event)
        self.end = event
        metrics, token_ms = self._metrics, self.start.trail.token_ms
        metrics.add("kvfold_output_tokens_total", event.num_tokens)
        if token_ms is not None:
            metrics.observe("kvfold_token_seconds", token_ms / 1e3)
        return reader.finish()

    def _fail(self, event: Ended) -> None:
        if event.reason == "late":
            self.start.trail.end = "late"  # the scheduler may be too busy to say so
            raise late(self._timeout_s)
        if event.reason == "cancelled":
            raise ApiError(529, "the server is shutting down; send the request again", retry_after_s=1)
        _log.error("request failed", exc_info=event.error, extra={"facts": {"request": self.start.trail.id}})
        raise api_error(event.error)

    def close(self) -> None:
        """Also called when nobody reads on: the job ends and gives its memory back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cancel()

    def _note_start(self, event: Began) -> None:
        metrics, paid = self._metrics, self.bill
        metrics.add("kvfold_reused_tokens_total", event.num_reused)
        for name, count in (("read", paid.num_read), ("written", paid.num_written), ("plain", paid.num_plain)):
            metrics.add("kvfold_prompt_tokens_total", count, billed=name)
        metrics.add("kvfold_cache_lookups_total", result=self._source.miss or "hit")
        metrics.observe("kvfold_first_token_seconds", time.perf_counter() - self.start.trail.came)


def late(seconds: float) -> ApiError:
    """Of a request whose time is over."""
    return ApiError(504, f"the request took longer than {seconds:g} s")


def api_error(error: Exception | None) -> ApiError:
    """What a client is told of a failed job: what we raised on purpose, else nothing of the inside."""
    if isinstance(error, MemoryError):
        return ApiError(529, str(error), retry_after_s=5)
    if isinstance(error, LogitsError):
        return ApiError(500, str(error))
    if isinstance(error, KvfoldError):
        return bad_request(str(error))
    return ApiError(500, "the request failed inside the server; its log says why")
