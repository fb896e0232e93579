"""OpenTelemetry traces: a span per API request with a child span per stage.

    POST /v1/messages
      queue | lookup | prefill | decode

Spans are created when a request has ended and exported over OTLP/HTTP by a background thread; failures are dropped.
Other settings are OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`, …).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvfold import __version__
from kvfold.errors import InputError, MissingExtra
from kvfold.serve.ops.request_trace import RequestTrace

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class TraceExporter:
    """`url`: an OTLP collector such as http://localhost:4318; None: the one of OpenTelemetry's variables."""

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

    def export(self, trace: RequestTrace) -> None:
        """Queue the spans of a finished request, under the client's `traceparent` if it sent one."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def ns(time_s: float) -> int:
            return int(1e9 * (trace.at + time_s - trace.arrived))

        assert trace.done is not None
        parent = TraceContextTextMapPropagator().extract({"traceparent": trace.parent} if trace.parent else {})
        name, facts = f"{trace.method} {trace.path}", _attributes(trace)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, facts, start_time=ns(trace.arrived))
        for stage in trace.stages:
            inside = set_span_in_context(span)
            self._tracer.start_span(stage.name, inside, start_time=ns(stage.start)).end(ns(stage.end))
        if (trace.status or 500) >= 500 or trace.end in ("failed", "late"):
            span.set_status(StatusCode.ERROR)
        span.end(ns(trace.done))

    def flush(self) -> bool:
        """Wait until queued spans are sent; False on time-out."""
        return self._provider.force_flush()

    def close(self) -> None:
        """Send queued spans, within OpenTelemetry's time-out."""
        self._provider.shutdown()


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """Named by OpenTelemetry's semantic conventions where they exist."""
    names: dict[str, Any] = {
        "http.request.method": trace.method,
        "http.route": trace.path,
        "http.response.status_code": trace.status,
        "kvfold.request": trace.id,
        "kvfold.tenant": trace.tenant,
    }
    if trace.queued is not None:
        names |= {
            "gen_ai.request.model": trace.model,
            "gen_ai.usage.input_tokens": trace.num_prompt,
            "gen_ai.usage.output_tokens": trace.num_output,
            "gen_ai.response.finish_reasons": None if trace.end is None else (trace.end,),
            "kvfold.tokens_reused": trace.num_reused,
            "kvfold.cache": trace.lookup,
        }
    return {name: value for name, value in names.items() if value is not None}


@contextmanager
def trace_exporter(url: str | None) -> Iterator[Callable[[RequestTrace], None]]:
    """A callback for finished requests; without `url` and OpenTelemetry's variables it does nothing."""
    if url is None and not any(map(os.environ.get, _VARIABLES)):
        yield lambda trace: None
        return
    exporter = TraceExporter(url)
    try:
        yield exporter.export
    finally:
        exporter.close()
