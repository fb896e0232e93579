"""The proxy passes requests and answers on unchanged, and survives its replicas: real processes and sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.serve.replicas.upstream import Unreachable, fetch
from kvfold.serve.settings import Limits
from tests.serve.asking import until
from tests.serve.replicas.proxied import Proxied, proxied
from tests.serve.replicas.stub import BODY_BYTES


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxied]:
    with proxied(2, limits=Limits(body_s=1.0)) as found:
        yield found


def test_a_request_passes_unchanged(proxy: Proxied) -> None:
    body = '{"model":"tiny",  "messages":[{"role":"user","content":"caf\\u00e9"}], "cache_control":{"ttl":"1h"}}'
    sent = {
        "x-api-key": "k",
        "Authorization": "Bearer b",
        "anthropic-beta": "a,b",
        "x-own": "é".encode().decode("latin-1"),
    }
    found = proxy.call("POST", "/v1/messages?beta=true&a=%20", body, sent)
    assert found.status == 200
    seen = found.json
    assert seen["line"] == "POST /v1/messages?beta=true&a=%20 HTTP/1.1"
    assert seen["body"] == body
    headers = dict(map(tuple, seen["headers"]))
    assert {name.lower(): value for name, value in sent.items()}.items() <= headers.items()
    assert headers["host"] == f"127.0.0.1:{proxy.port}"
    assert (found.headers["x-own"], found.headers["x-kvfold-replica"]) == ("kept", str(seen["number"]))


def test_errors_of_a_replica_pass_unchanged(proxy: Proxied) -> None:
    found = proxy.post({"do": "refuse"})
    assert (found.status, found.headers["retry-after"]) == (429, "7")
    assert found.json == {"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}


def test_prompts_that_begin_alike_meet_in_one_replica(proxy: Proxied) -> None:
    where = [
        {
            proxy.post({"model": "m", "messages": [{"role": "user", "content": f"{i}"}, *range(turn)]}).json["number"]
            for turn in range(3)
        }
        for i in range(16)
    ]
    assert all(len(numbers) == 1 for numbers in where)
    assert set().union(*where) == {0, 1}


def test_a_stream_passes_piece_by_piece(proxy: Proxied) -> None:
    connection = proxy.ask("POST", "/v1/messages", {"do": "stream"})
    answer = connection.getresponse()
    assert answer.read(9) == b"data: 1\n\n"  # the second piece is not written yet
    for backend in proxy.fleet.backends:
        with socket.socket(socket.AF_UNIX) as direct:
            direct.connect(backend.socket)
            direct.sendall(b"GET /go HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert direct.recv(12) == b"HTTP/1.1 200"
    assert answer.read() == b"data: 2\n\n"
    connection.close()


def test_a_client_that_leaves_ends_its_request(proxy: Proxied) -> None:
    before = facts(proxy, "left")
    connection = proxy.ask("POST", "/v1/messages", {"do": "wait"})
    until(lambda: any(backend.num_in_flight for backend in proxy.fleet.backends))
    connection.close()
    until(lambda: facts(proxy, "left") == before + 1)
    until(lambda: not any(backend.num_in_flight for backend in proxy.fleet.backends))
    assert proxy.call("GET", "/metrics").text.count("kvfold_proxy_retries_total 0\n") == 1, "nobody tried it again"


def facts(proxy: Proxied, name: str) -> int:
    """Of all replicas, asked directly."""
    total = 0
    for backend in proxy.fleet.backends:
        with socket.socket(socket.AF_UNIX) as direct:
            direct.connect(backend.socket)
            direct.sendall(b"GET /facts HTTP/1.0\r\n\r\n")
            raw = b""
            while piece := direct.recv(4096):
                raw += piece
        total += json.loads(raw.partition(b"\r\n\r\n")[2])[name]
    return total


def test_bodies_over_the_limit_are_refused_by_the_replica(proxy: Proxied) -> None:
    assert proxy.post("x" * (BODY_BYTES + 1)).status == 413
    assert proxy.post("x" * BODY_BYTES).status == 200
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        client.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 413"
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        client.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 413", "told by the head alone"


@pytest.mark.parametrize(("path", "is_anthropic"), [("/v1/messages", True), ("/v1/chat/completions", False)])
def test_a_body_that_does_not_come_is_408_in_the_clients_shape(proxy: Proxied, path: str, is_anthropic: bool) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode())
        raw = b""
        while piece := client.recv(4096):
            raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert ("request_id" in json.loads(body)) == is_anthropic


def test_connections_to_replicas_are_kept_and_replaced_when_they_end(proxy: Proxied) -> None:
    """Also behind answers without a body; one that the replica closes over a request costs no retry."""
    alike = {"messages": [{"role": "user", "content": "kept"}]}
    first = json.loads(proxy.post(alike).text)
    assert proxy.call("HEAD", "/v1/models").status == 501, "the stub knows no HEAD"
    again = json.loads(proxy.post(alike).text)
    assert (again["number"], again["request"]) == (first["number"], first["request"] + 1)
    fresh = json.loads(proxy.post({**alike, "do": "hang_up"}).text)
    assert (fresh["number"], fresh["request"]) == (first["number"], 1)
    assert json.loads(proxy.post(alike).text)["request"] == 2
    assert "kvfold_proxy_retries_total 0\n" in proxy.call("GET", "/metrics").text


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n", b"nonsense 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nx\r\n\r\n"]
)
def test_what_is_no_answer_is_unreachable(tmp_path: Path, answer: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path):
            with pytest.raises(Unreachable):
                await fetch(path, "GET", b"/", [], b"", 10)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (b"transfer-encoding: Chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\nlast: 1\r\n\r\n", b"hello"),
        (b"x: 1\r\n\r\nhello", b"hello"),
        (b"content-length: 6\r\n\r\nhello", None),
        (b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", None),
        (b"transfer-encoding: chunked\r\n\r\nz\r\nhello\r\n", None),
    ],
)
def test_bodies_end_as_their_framing_says(tmp_path: Path, answer: bytes, body: bytes | None) -> None:
    """Byte by byte, behind a 100; None: broken off."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for byte in b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + answer:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            writer.close()

        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path):
            if body is None:
                with pytest.raises(Unreachable):
                    await fetch(path, "GET", b"/", [], b"", 10)
            else:
                assert (await fetch(path, "GET", b"/", [], b"", 10))[2] == body

    asyncio.run(main())


def test_metrics_are_summed_and_tell_of_the_replicas(proxy: Proxied) -> None:
    text = proxy.call("GET", "/metrics").text
    assert "\na_total 3\n" in text
    assert text.count("# TYPE a_total counter") == 1
    assert 'kvfold_replica_up{replica="1"} 1' in text
    assert proxy.call("HEAD", "/metrics").text == ""


def test_a_replica_that_is_killed_costs_no_request_and_comes_back() -> None:
    with proxied(2) as proxy:
        bodies = [{"model": "m", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(12)]
        before = [proxy.post(body).json["number"] for body in bodies]
        pids = proxy.pids
        os.kill(pids[0], signal.SIGKILL)
        assert {proxy.post(body).status for body in bodies} == {200}
        until(lambda: proxy.fleet.replicas[0].num_starts == 2)
        proxy.settle()
        assert [proxy.post(body).json["number"] for body in bodies] == before, "its prompts go to it again"
        assert proxy.pids[0] != pids[0]
        assert proxy.pids[1] == pids[1]


def test_a_request_that_kills_its_replica_is_tried_once_more_and_no_further() -> None:
    with proxied(3) as proxy:
        at = proxy.post({"model": "m", "messages": []}).json["number"]
        found = proxy.post({"model": "m", "messages": [], "do": "die_once", "at": at})
        assert found.status == 200
        assert found.json["number"] != at
        proxy.settle()
        for path, status in (("/v1/messages", 529), ("/v1/chat/completions", 503)):
            killed = proxy.post({"do": "die"}, path)
            assert (killed.status, killed.headers["retry-after"]) == (status, "1")
            assert killed.headers["request-id"].startswith("req_")
            until(lambda: sum(backend.is_up for backend in proxy.fleet.backends) < 3)
            proxy.settle()
        starts = sorted(replica.num_starts for replica in proxy.fleet.replicas)
        assert sum(starts) == 3 + 1 + 2 + 2, "one death, and two of each request that kills"


def test_a_stream_whose_replica_dies_ends_with_an_error_event() -> None:
    with proxied(1) as proxy:
        connection = proxy.ask("POST", "/v1/messages", {"do": "break_off"})
        text = connection.getresponse().read().decode()
        connection.close()
        assert text.startswith("data: 1\n\nevent: error\ndata: ")
        assert json.loads(text.rpartition("data: ")[2])["error"]["type"] == "api_error"


def test_nobody_up_is_told_with_a_time_to_come_back() -> None:
    with proxied(1) as proxy:
        proxy.fleet.backends[0].socket = "/nowhere"
        found = proxy.post({})
        assert (found.status, found.json["error"]["type"]) == (529, "overloaded_error")
        assert proxy.call("GET", "/health").status == 503
        assert proxy.call("GET", "/ready").status == 503
