"""Clients that send slowly or not at all, that do not read, that are too many: none of them holds a place for long."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import anthropic
import pytest

from kvfold.errors import InputError
from kvfold.serve.connections import most_connections
from kvfold.serve.settings import Limits
from tests.serve.asking import get, until
from tests.serve.running import Running, running, tool_model

HELLO: Any = [{"role": "user", "content": "the cat sat"}]
SHORT: Any = {"model": "tiny", "max_tokens": 2, "messages": HELLO}
ENDLESS: Any = {"model": "tiny", "max_tokens": 900, "messages": HELLO}


@contextmanager
def connected(server: Running, sent: bytes = b"", receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as found:
        if receive_bytes is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        found.settimeout(60)
        found.connect(("127.0.0.1", server.port))
        found.sendall(sent)
        yield found


def rest_of(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    try:
        while piece := client.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def post(body: dict[str, Any], num_missing: int = 0) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data) + num_missing}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("sent", [b"", b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_end_is_waited_for_so_long(sent: bytes) -> None:
    with running(tool_model(), limits=Limits(header_s=0.3)) as server, connected(server, sent) as client:
        assert rest_of(client) == b""


def test_bytes_that_trickle_in_do_not_put_the_end_off() -> None:
    first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with running(tool_model(), limits=Limits(header_s=0.3)) as server, connected(server, first) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        deadline = time.monotonic() + 60
        with pytest.raises(OSError):  # the head of a second request is bounded, too
            while time.monotonic() < deadline:
                client.sendall(b"G")
                time.sleep(0.05)


def test_a_body_that_does_not_end_is_answered_with_408() -> None:
    with running(tool_model(), limits=Limits(body_s=0.3)) as server:
        with connected(server, post(SHORT, num_missing=9)) as client:
            head, _, body = rest_of(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head
        assert json.loads(body)["error"]["type"] == "timeout_error"
        assert server.service.num_running.total() == 0


def test_a_client_that_does_not_read_is_dropped() -> None:
    with running(tool_model(), limits=Limits(write_s=0.5, per_tenant=1)) as server:
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connected(server, post({**ENDLESS, "stream": True}), 2048) as client:
            until(lambda: server.service.num_running.total() == 1)
            until(lambda: server.service.num_running.total() == 0)
            until(lambda: server.service.scheduler.num_running == 0)
            assert server.anthropic.messages.create(**SHORT).usage.output_tokens == 2
            time.sleep(1.0)  # more than write_s
            assert b"message_stop" not in rest_of(client)


def test_a_place_is_free_when_its_job_has_ended_whether_or_not_anybody_reads() -> None:
    with running(tool_model(), limits=Limits(write_s=600, per_tenant=1)) as server:
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connected(server, post({**ENDLESS, "stream": True}), 2048):
            until(lambda: server.service.num_running.total() == 1)
            until(lambda: server.service.num_running.total() == 0)
            assert server.service.scheduler.num_cancelled == 0, "it has come to its end"
            assert server.anthropic.messages.create(**SHORT).usage.output_tokens == 2


def test_a_client_too_many_is_told_and_served_once_others_are_gone() -> None:
    with running(tool_model(), limits=Limits(connections=3, header_s=2.0)) as server, ExitStack() as clients:
        for _ in range(3):
            clients.enter_context(connected(server))
        with connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as client:
            head, _, body = rest_of(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head
        assert json.loads(body)["error"]["type"] == "overloaded_error"
        with pytest.raises(anthropic.InternalServerError):
            server.anthropic.messages.create(**SHORT)
        until(lambda: get(server, "/health")[0] == 200)


def test_more_connections_than_descriptors_are_refused() -> None:
    assert 1 <= most_connections(None) <= 1024
    assert most_connections(7) == 7
    with pytest.raises(InputError, match=r"raise the limit \(ulimit -n\) or lower --max-connections"):
        most_connections(1 << 40)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_late_request_is_answered_while_the_scheduler_is_stuck(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass of the model that does not end: nothing looks at deadlines but the server's loop."""
    go_on, is_stuck = Event(), Event()
    with running(tool_model(), limits=Limits(request_s=1.0, per_tenant=1)) as server:
        prefill = server.service._runner.prefill

        def stuck(*given: Any, **options: Any) -> Any:
            is_stuck.set()
            assert go_on.wait(60)
            return prefill(*given, **options)

        monkeypatch.setattr(server.service._runner, "prefill", stuck)
        try:
            for _ in range(2):  # the first one's place is free for the second
                with pytest.raises(anthropic.APIStatusError) as caught:
                    server.anthropic.messages.create(**ENDLESS, stream=is_streamed)
                assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")
            assert is_stuck.is_set()
        finally:
            go_on.set()
        monkeypatch.setattr(server.service._runner, "prefill", prefill)
        until(lambda: server.service.scheduler.num_running == 0)
        server.service.settings = replace(server.service.settings, limits=Limits(per_tenant=1))  # time enough
        assert server.anthropic.messages.create(**SHORT).usage.output_tokens == 2


def test_health_tells_of_a_scheduler_that_does_not_run() -> None:
    with running(tool_model()) as server:
        scheduler = server.service.scheduler
        assert get(server, "/ready")[:2] == (200, '{"ready":true,"state":"running"}')
        for state in ("restarting", "failed"):
            scheduler._supervisor._state = state
            for path in ("/health", "/ready"):
                status, text, _ = get(server, path)
                assert status == 503 and state in text
        scheduler._supervisor._state = "running"
        assert get(server, "/health")[0] == get(server, "/ready")[0] == 200
        server.service.is_closing = True
        assert get(server, "/ready")[:2] == (503, '{"ready":false,"state":"closing"}')
        with pytest.raises(anthropic.APIStatusError, match="shutting down"):
            server.anthropic.messages.create(**SHORT)


# Heads


def answer_to(server: Running, sent: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Status and body of the first answer, and what came after it until the connection was closed."""
    with connected(server, sent) as client:
        client.shutdown(socket.SHUT_WR)
        head, _, rest = rest_of(client).partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return int(head.split()[1]), json.loads(rest[:length]), rest[length:]


def test_a_head_is_bounded_before_it_is_parsed() -> None:
    plain = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 9000 + b"\r\n"
    long = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000 + b"\r\n\r\n"
    with running(tool_model()) as server:
        for sent in (many, long):
            status, body, rest = answer_to(server, sent)
            assert status == 431 and "at most 32768 bytes in 128 lines" in body["error"]["message"] and not rest
        with connected(server, plain + many) as client:  # in the same bytes as one that is fine
            assert b"431 Request Header Fields Too Large" in rest_of(client)
        assert answer_to(server, plain)[0] == 200


def test_a_body_with_two_lengths_is_refused_and_nothing_behind_it_served() -> None:
    smuggled = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nTransfer-Encoding : chunked\r\n\r\n"
    with running(tool_model()) as server:
        status, body, rest = answer_to(server, head + b"0\r\n\r\n" + smuggled)
        assert (status, rest) == (400, b"") and "exclude each other" in body["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET http://127.0.0.1/nowhere HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400),
    ],
)
def test_what_no_route_sees_is_refused_in_the_vendors_shape(sent: bytes, status: int) -> None:
    with running(tool_model()) as server:
        found, body, _ = answer_to(server, sent)
        assert found == status and body["error"]["message"] and body["error"]["type"]


def test_a_target_may_be_a_whole_url() -> None:
    with running(tool_model()) as server:
        status, body, _ = answer_to(server, b"GET http://any.where:80/health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (status, body["status"]) == (200, "ok")


def test_a_stream_is_chunked_and_to_an_old_client_it_is_not() -> None:
    """Chunks that are written straight to the connection are those of HTTP/1.1; HTTP/1.0 has none."""
    body = json.dumps({**SHORT, "max_tokens": 6, "stream": True}).encode()
    with running(tool_model()) as server:
        replies = [_streamed(server, version, body) for version in ("1.1", "1.0")]
    assert ["chunked" in head for head, _ in replies] == [True, False]
    assert replies[1][1].startswith(b"event: ")
    texts = [_text(dechunked(replies[0][1])), _text(replies[1][1])]
    assert texts[0] and texts[0] == texts[1]


def _streamed(server: Running, version: str, body: bytes) -> tuple[str, bytes]:
    """Headers and body of a reply."""
    head = f"POST /v1/messages HTTP/{version}\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}"
    with connected(server, f"{head}\r\n\r\n".encode() + body) as client:
        found, _, rest = rest_of(client).partition(b"\r\n\r\n")
    return found.decode().lower(), rest


def _text(stream: bytes) -> str:
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == {"type": "message_stop"}
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def dechunked(body: bytes) -> bytes:
    found = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert rest == b"\r\n"
            return found
        found, body = found + rest[:length], rest[length + 2 :]
