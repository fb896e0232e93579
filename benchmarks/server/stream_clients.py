"""Clients of a server in a process of their own: all requests at once, over plain sockets, timed by what arrives.

    python -m benchmarks.server.stream_clients < JOB

A job is JSON: `port`, `path`, `bodies`, `timeout_s`. The process connects once for each body, sends all of them, notes
the time of every read, and parses when the last reply is complete, so that clients take little of the machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A server-sent event that carries text, and when it was complete."""

    at: float
    text: str


class Client(asyncio.Protocol):
    """One connection; `done` is set when the server has closed it."""

    def __init__(self) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def reply(self) -> tuple[int, bytes]:
        """Status and body, chunks joined."""
        head, _, body = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        return status, _joined(body) if b"transfer-encoding: chunked" in head.lower() else body

    def frames(self) -> list[Frame]:
        """Events with text; an event is complete when the read that has its last byte came."""
        ends, whole = list(accumulate(len(data) for _, data in self.reads)), b"".join(data for _, data in self.reads)
        found, at = [], whole.find(b"data: {")
        while at >= 0:
            end = whole.index(b"\n", at)
            choices = json.loads(whole[at + 6 : end]).get("choices") or [{}]
            if text := choices[0].get("text"):
                found.append(Frame(self.reads[bisect_left(ends, end + 1)][0], text))
            at = whole.find(b"data: {", end)
        return found


def _joined(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :] if length else b""
    return b"".join(parts)


async def ask_all(job: dict[str, Any]) -> tuple[float, list[Client]]:
    """When the requests were sent, and the clients once all replies are complete."""
    loop = asyncio.get_running_loop()
    made = [loop.create_connection(Client, "127.0.0.1", job["port"]) for _ in job["bodies"]]
    connected = await asyncio.gather(*made)
    sent = [_request(job["path"], body) for body in job["bodies"]]
    began = time.perf_counter()
    for (transport, _), request in zip(connected, sent, strict=True):
        transport.write(request)
    clients = [client for _, client in connected]
    await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), job["timeout_s"])
    return began, clients


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def measured(began: float, clients: list[Client], is_streamed: bool) -> dict[str, Any]:
    """Times in seconds from the sending; of streams, events with text as (seconds, characters)."""
    replies = [client.reply() for client in clients]
    failed = [body[:300].decode(errors="replace") for status, body in replies if status != 200]
    last = max((at for client in clients for at, _ in client.reads), default=began)
    found: dict[str, Any] = {"failed": failed, "seconds": last - began}
    if is_streamed:
        streams = [client.frames() for client in clients]
        found["streams"] = [[(frame.at - began, len(frame.text)) for frame in frames] for frames in streams]
    elif not failed:
        found["usage"] = [json.loads(body)["usage"] for _, body in replies]
    return found


def run_job() -> None:
    job = json.load(sys.stdin)
    began, clients = asyncio.run(ask_all(job))
    print(json.dumps(measured(began, clients, bool(job["bodies"][0].get("stream")))))


if __name__ == "__main__":
    run_job()
