"""Traces, as a collector that speaks OTLP over HTTP gets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anthropic
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs: pip install 'kvfold[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvfold.errors import InputError, MissingExtra
from kvfold.serve.ops.request_trace import RequestTrace
from kvfold.serve.ops.tracing import TraceExporter, trace_exporter
from tests.serve.asking import SECRET, send
from tests.serve.running import Running, running, tool_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A server that keeps the spans it is sent, by name, and every byte."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service = ""
        self.sent = b""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.take(data)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, data: bytes) -> None:
        self.sent += data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.service = attributes(resource.resource)["service.name"]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in found.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture
def traced(collector: Collector) -> Iterator[tuple[Running, TraceExporter]]:
    traces = TraceExporter(collector.url)
    with running(tool_model(), on_done=traces.export) as server:
        yield server, traces
    traces.close()


def test_a_request_is_a_span_with_its_stages(collector: Collector, traced: tuple[Running, TraceExporter]) -> None:
    server, traces = traced
    usage = send(server, extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}).usage
    assert traces.flush()
    by_name = {span.name: span for span in collector.spans}
    assert sorted(by_name) == ["POST /v1/messages", "decode", "lookup", "prefill", "queue"]
    outer = by_name.pop("POST /v1/messages")
    assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.parent_span_id for span in by_name.values()} == {outer.span_id}
    stages = [by_name[name] for name in ("queue", "lookup", "prefill", "decode")]
    times = [time for span in stages for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert outer.start_time_unix_nano <= times[0]
    assert times[-1] <= outer.end_time_unix_nano
    found = attributes(outer)
    assert (found["http.route"], found["http.response.status_code"]) == ("/v1/messages", 200)
    assert found["gen_ai.usage.input_tokens"] == usage.cache_creation_input_tokens + usage.input_tokens
    assert found["gen_ai.usage.output_tokens"] == 5
    assert (found["kvfold.cache"], found["kvfold.tenant"]) == ("absent", "default")
    assert collector.service == "kvfold"
    assert SECRET[:7].encode() not in collector.sent


def test_a_refused_request_has_no_stages(collector: Collector, traced: tuple[Running, TraceExporter]) -> None:
    server, traces = traced
    with pytest.raises(anthropic.NotFoundError):
        send(server, model="other")
    assert traces.flush()
    (span,) = collector.spans
    assert attributes(span)["http.response.status_code"] == 404
    assert span.status.code == 0, "what the client did wrong is no error of the server"


def test_a_variable_names_the_collector_too(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with trace_exporter(None) as note:
        note(RequestTrace("req_1", "POST", "/v1/messages", status=500, arrived=1.0, done=2.0))
    assert [(span.name, span.status.code) for span in collector.spans] == [("POST /v1/messages", 2)]
    assert collector.service == "mine"


def test_a_collector_that_is_not_there_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with trace_exporter("http://127.0.0.1:9") as note, running(tool_model(), on_done=note) as server:
        assert send(server).usage.output_tokens == 5


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(InputError, match='"localhost:4318" is no address of a collector'):
        TraceExporter("localhost:4318")


def test_where_it_is_not_installed_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtra, match=r"run: pip install 'kvfold\[otel\]'"):
        TraceExporter("http://localhost:4318")
