"""Traces for OpenTelemetry: of each request to the API a span, with one for each stage that it came through.

    POST /v1/messages
      queue | lookup | prefill | decode

Spans are made when a request is over, and sent over OTLP/HTTP by a thread of their own; what cannot be sent is dropped.
Other settings are OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`, …).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvfold import __version__
from kvfold.errors import InputError, MissingExtra
from kvfold.serve.ops.request_trace import Trail

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Traces:
    """`url` is that of a collector, as http://localhost:4318; None: the one that the variables name."""

    def __init__(self, url: str | None) -> None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise InputError(f'"{url}" is no address of a collector; give one such as http://localhost:4318')
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingExtra("traces need OpenTelemetry; run: pip install 'kvfold[otel]'") from error
        facts = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "kvfold"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        endpoint = None if url is None else f"{url.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("kvfold.serve", __version__)

    def note(self, trail: Trail) -> None:
        """A request that is over; a client that sends a `traceparent` finds it in its own trace."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def ns(time_s: float) -> int:
            return int(1e9 * (trail.at + time_s - trail.came))

        assert trail.done is not None
        parent = TraceContextTextMapPropagator().extract({"traceparent": trail.parent} if trail.parent else {})
        name, facts = f"{trail.method} {trail.path}", _attributes(trail)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, facts, start_time=ns(trail.came))
        for stage in trail.stages:
            inside = set_span_in_context(span)
            self._tracer.start_span(stage.name, inside, start_time=ns(stage.start)).end(ns(stage.end))
        if (trail.status or 500) >= 500 or trail.end in ("failed", "late"):
            span.set_status(StatusCode.ERROR)
        span.end(ns(trail.done))

    def flush(self) -> bool:
        """Wait until what was noted is sent; False if that took too long."""
        return self._provider.force_flush()

    def close(self) -> None:
        """Send what waits, for a while."""
        self._provider.shutdown()


def _attributes(trail: Trail) -> dict[str, Any]:
    """By OpenTelemetry's conventions where they have a name."""
    names: dict[str, Any] = {
        "http.request.method": trail.method,
        "http.route": trail.path,
        "http.response.status_code": trail.status,
        "kvfold.request": trail.id,
        "kvfold.tenant": trail.tenant,
    }
    if trail.queued is not None:
        names |= {
            "gen_ai.request.model": trail.model,
            "gen_ai.usage.input_tokens": trail.num_prompt,
            "gen_ai.usage.output_tokens": trail.num_output,
            "gen_ai.response.finish_reasons": None if trail.end is None else (trail.end,),
            "kvfold.tokens_reused": trail.num_reused,
            "kvfold.cache": trail.lookup,
        }
    return {name: value for name, value in names.items() if value is not None}


@contextmanager
def open_traces(url: str | None) -> Iterator[Callable[[Trail], None]]:
    """What is to be told of each request; it does nothing where neither `url` nor a variable names a collector."""
    if url is None and not any(map(os.environ.get, _VARIABLES)):
        yield lambda trail: None
        return
    traces = Traces(url)
    try:
        yield traces.note
    finally:
        traces.close()
