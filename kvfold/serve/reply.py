"""A reply being generated: begins, streams text and tool calls, ends exactly once, also when the client disconnects."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from kvfold.engine.scheduling.jobs import Ended, Event, PrefillDone, TextDelta
from kvfold.errors import KvfoldError, LogitsError, OutOfPages, TooLarge
from kvfold.serve.api.errors import ApiError, bad_request, prompt_too_long
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.api.tool_calls import ToolCall, ToolCallParser
from kvfold.serve.cache.breakpoints import Boundary, CachePlan
from kvfold.serve.cache.source import PlainSource
from kvfold.serve.cache.usage import Usage
from kvfold.serve.event_queue import ChunkStream, EventQueue, Line
from kvfold.serve.ids import random_id
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.request_trace import RequestTrace

_log = logging.getLogger("kvfold.serve")
CachePlanner = Callable[[Sequence[Boundary], int], CachePlan]  # from boundaries and the minimum cacheable length


@dataclass(frozen=True)
class Body:
    """What an API has parsed. `planner` decides what is cached, None: nothing."""

    request: ChatRequest
    is_streamed: bool = False
    planner: CachePlanner | None = None
    cache_key: str = ""


@dataclass(frozen=True)
class RequestContext:
    """Tenant and arrival time of a request, and how it is cached."""

    tenant: str
    at: float
    planner: CachePlanner | None = None
    cache_key: str = ""  # OpenAI's prompt_cache_key: requests of different keys share no cache
    trace: RequestTrace = field(default_factory=RequestTrace)
    num_bytes: int = 0  # of the body
    is_streamed: bool = True


class Reply:
    """`parts` yields texts and tool calls; afterwards `end` has the finish reason."""

    def __init__(
        self,
        request: ChatRequest,
        context: RequestContext,
        events: EventQueue,
        source: PlainSource,
        plan: CachePlan,
        *,
        metrics: Metrics,
        cancel: Callable[[], None],
        timeout_s: float,
        is_cut: bool,
        num_cut: int | None = None,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self.request, self.context, self.plan, self.is_cut = request, context, plan, is_cut
        self.id = random_id()
        self.end: Ended | None = None
        self.has_calls = False
        self._num_cut = num_cut
        self._events, self._source, self._metrics, self._cancel = events, source, metrics, cancel
        self._timeout_s, self._on_complete = timeout_s, on_complete
        self._is_closed = False
        self._parser = ToolCallParser(request.calls_tools)

    def write_to(self, stream: ChunkStream) -> None:
        """Where texts are written that nobody has to read (`write_texts`)."""
        self._events.stream = stream

    def write_texts(self, line: Line | None) -> None:
        """While `parts` waits, texts go to the stream at once, each as such a line; None: `parts` yields them."""
        if line is None or not self.request.calls_tools:
            self._events.line = line
        else:
            self._events.line = lambda text: line(text) if self._parser.is_text(text) else None

    @property
    def usage(self) -> Usage:
        return replace(self._source.usage, num_cut=self._num_cut)

    @property
    def num_output(self) -> int:
        return 0 if self.end is None else self.end.num_tokens

    async def begin(self) -> None:
        """Wait for the prefill to finish."""
        try:
            event = await self._events.get()
            if isinstance(event, Ended):
                self._fail(event)
            assert isinstance(event, PrefillDone)
            self._note_start(event)
        except BaseException:
            self.close()
            raise

    async def parts(self) -> AsyncIterator[str | ToolCall]:
        """Texts and tool calls as they are generated; ApiError if generation fails."""
        try:
            while self.end is None:
                event = await self._events.get()
                for part in self._taken(event):
                    self.has_calls = self.has_calls or isinstance(part, ToolCall)
                    yield part
        finally:
            self.close()

    async def joined_parts(self) -> list[str | ToolCall]:
        """All parts; texts that follow each other are one."""
        found: list[str | ToolCall] = []
        async for part in self.parts():
            if isinstance(part, str) and found and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
        return found

    def _taken(self, event: Event) -> list[str | ToolCall]:
        if isinstance(event, TextDelta):
            return self._parser.add(event.text)
        assert isinstance(event, Ended)
        if event.reason in ("late", "failed", "cancelled"):
            self._fail(event)
        self.end = event
        self._on_complete()
        metrics, token_ms = self._metrics, self.context.trace.token_ms
        metrics.add("kvfold_output_tokens_total", event.num_tokens)
        if token_ms is not None:
            metrics.observe("kvfold_token_seconds", token_ms / 1e3)
        return self._parser.finish()

    def _fail(self, event: Ended) -> None:
        if event.reason == "late":
            self.context.trace.end = "late"  # the scheduler may not have reported it yet
            raise timed_out(self._timeout_s)
        if event.reason == "cancelled":
            raise ApiError(529, "the server is shutting down; send the request again", retry_after_s=1)
        if isinstance(event.error, ApiError):  # an engine's, whose reason the request's log line has
            raise event.error
        found = api_error(event.error)
        if found.status == 500 or not isinstance(event.error, KvfoldError):
            _log.error("request failed", exc_info=event.error, extra={"facts": {"request": self.context.trace.id}})
        raise found

    def close(self) -> None:
        """Cancel the job if it still runs and free its KV cache; also called when the client disconnects."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cancel()

    def _note_start(self, event: PrefillDone) -> None:
        metrics, usage = self._metrics, self.usage
        metrics.add("kvfold_reused_tokens_total", event.num_reused)
        for name, count in (("read", usage.num_read), ("written", usage.num_written), ("plain", usage.num_plain)):
            metrics.add("kvfold_prompt_tokens_total", count, billed=name)
        metrics.add("kvfold_cache_lookups_total", result=self._source.miss or "hit")
        metrics.observe("kvfold_first_token_seconds", time.perf_counter() - self.context.trace.arrived)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} s")


def api_error(error: Exception | None) -> ApiError:
    """The client's error for a failed job: our own errors' messages, no details of internal ones."""
    if isinstance(error, TooLarge):
        advice = "nothing else is in it; send a shorter request, or start the server with more --memory"
        return prompt_too_long(str(error).replace(OutOfPages.ADVICE, advice))
    if isinstance(error, OutOfPages):
        advice = "try again later, send a shorter request, or start the server with more --memory"
        return ApiError(529, str(error).replace(OutOfPages.ADVICE, advice), retry_after_s=5)
    if isinstance(error, MemoryError):
        return ApiError(529, str(error), retry_after_s=5)
    if isinstance(error, LogitsError):
        return ApiError(500, str(error))
    if isinstance(error, KvfoldError):
        return bad_request(str(error))
    return ApiError(500, "the request failed inside the server; its log says why")
