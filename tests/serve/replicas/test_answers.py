"""Answers that the proxy writes in one piece are framed as any other: kept connections, their ends, HEAD, HTTP/1.0."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.serve.replicas.proxied import Proxied, proxied

BODY = b'{"messages": []}'
HEAD = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxied]:
    with proxied(1) as found:
        yield found


def sent(proxy: Proxied, *pieces: bytes) -> list[tuple[list[bytes], bytes]]:
    """Lines of the head and body of each answer, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        for piece in pieces:
            client.sendall(piece)
        raw = b""
        while more := client.recv(4096):
            raw += more
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length = next((int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        found.append((lines, raw[:length]))
        raw = raw[length:]
    return found


def test_requests_that_are_sent_at_once_are_answered_in_order_on_one_connection(proxy: Proxied) -> None:
    last = BODY.replace(b"[]", b"42")
    request = HEAD + b"\r\n" + BODY
    (first, _), (second, _), (third, body) = sent(proxy, request * 2 + HEAD + b"connection: close\r\n\r\n" + last)
    assert [lines[0] for lines in (first, second, third)] == [b"HTTP/1.1 200 OK"] * 3
    assert [b"connection: close" in lines for lines in (first, second, third)] == [False, False, True]
    assert json.loads(body)["body"] == last.decode()
    assert third.count(b"x-kvfold-replica: 0") == 1


def test_an_old_client_gets_one_answer(proxy: Proxied) -> None:
    ((lines, body),) = sent(proxy, HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + BODY)
    assert b"connection: close" in lines
    assert json.loads(body)["body"] == BODY.decode()


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(proxy: Proxied) -> None:
    head = HEAD + b"expect: 100-continue\r\nconnection: close\r\n\r\n"
    (asked, _), (answered, body) = sent(proxy, head, BODY)
    assert asked[0].startswith(b"HTTP/1.1 100")
    assert answered[0] == b"HTTP/1.1 200 OK"
    assert json.loads(body)["body"] == BODY.decode()


@pytest.mark.parametrize("target", [b"http://proxy:80/v1/models?a=1", b"HTTPS://x/v1/models?a=1"])
def test_a_target_may_be_a_whole_url(proxy: Proxied, target: bytes) -> None:
    ((lines, body),) = sent(proxy, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert json.loads(body) == {"path": "/v1/models?a=1"}


def test_a_url_without_a_path_is_the_root(proxy: Proxied) -> None:
    ((_, body),) = sent(proxy, b"GET http://x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert json.loads(body) == {"path": "/"}
