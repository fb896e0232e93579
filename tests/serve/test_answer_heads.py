"""Heads of replies, which the server writes itself: framing, and whether the connection ends, as HTTP wants them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest

from tests.serve.running import Running, running, tool_model

_LENGTH = 6


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model()) as found:
        yield found


def _request(version: str, is_streamed: bool, *headers: str) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "the cat sat", "max_tokens": _LENGTH, "stream": is_streamed}).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _answer(client: socket.socket) -> HTTPResponse:
    found = HTTPResponse(client, method="POST")
    found.begin()
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_connection_serves_one_request_after_the_other(server: Running, is_streamed: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        ids = set()
        for _ in range(3):
            client.sendall(_request("1.1", is_streamed))
            answer = _answer(client)
            assert (answer.status, answer.reason, answer.getheader("connection")) == (200, "OK", None)
            assert answer.getheader("date")
            assert answer.getheader("server") == "uvicorn"
            assert (answer.getheader("transfer-encoding") == "chunked") == is_streamed
            ids.add(answer.getheader("request-id"))
            body = answer.read()
            assert body.endswith(b"data: [DONE]\n\n") if is_streamed else json.loads(body)["usage"]
            assert is_streamed or answer.getheader("content-length") == str(len(body))
        assert len(ids) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("version", "headers"), [("1.1", ["connection: close"]), ("1.0", [])])
def test_the_last_answer_of_a_connection_says_so(
    server: Running, is_streamed: bool, version: str, headers: list[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(_request(version, is_streamed, *headers))
        answer = _answer(client)
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert b"usage" in answer.read() or is_streamed
        assert client.recv(1) == b""


def test_a_client_that_waits_for_leave_gets_one_head(server: Running) -> None:
    request = _request("1.1", True, "expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert _answer(client).read().endswith(b"data: [DONE]\n\n")
