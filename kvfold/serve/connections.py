"""HTTP connections: time-outs for request headers and writes, limits on header size and on concurrent connections.

    connected …… headers received …… answered …… next headers begin …… headers received
    |    header_s    |               | keep-alive |       header_s       |
                     | write_s: whenever the client does not read what was written |

uvicorn limits only how long an idle connection is kept alive. Headers are parsed in the event loop before
authentication, so their size is checked before they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvfold.errors import InputError
from kvfold.serve.api.errors import KINDS
from kvfold.serve.api.sse import CHUNKS
from kvfold.serve.disconnect import DISCONNECT, Disconnect
from kvfold.serve.settings import Limits

ANSWER_WRITER = "kvfold.write_answer"  # in the scope: writes a whole answer, head and body, to the connection
OK_WRITER = "kvfold.write_ok"  # the same, of a 200 whose headers are given
BACKLOG = 64  # listen backlog of the socket
_MOST_REFUSED = 32  # connections that are being sent a 503
_SPARE = BACKLOG + _MOST_REFUSED + 32  # file descriptors for these, and for files of the store
_DEFAULT = 1024
_REFUSED_S = 1.0  # for a client to read its 503
_HEAD_BYTES, _HEAD_LINES = 32 << 10, 128
_ANSWER, _END = h11.Response(status_code=200, headers=[("content-length", "0")]), h11.EndOfMessage()
_CHUNKED = h11.Response(status_code=200, headers=[("transfer-encoding", "chunked")])
Headers = Sequence[tuple[bytes, bytes]]  # names in lower case, made by this server
_ABSOLUTE = re.compile(rb"(?i)https?://[^/]+")
_FRAMED = tuple(re.compile(rb"(?im)^%s[ \t]*:" % name) for name in (b"content-length", b"transfer-encoding"))


def _refusal(status: HTTPStatus, message: str, *more: str) -> bytes:
    """A raw HTTP error response that both vendors' clients can parse, for a request that is not read."""
    error = {"type": KINDS.get(status, KINDS[400]), "message": message, "param": None, "code": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    head = [f"HTTP/1.1 {status.value} {status.phrase}", "content-type: application/json", *more]
    return "\r\n".join([*head, f"content-length: {len(body)}", "connection: close", "", ""]).encode() + body


_TOO_MANY = "the server has reached its connection limit; try again later"
_TOO_LONG = f"the head of a request has at most {_HEAD_BYTES} bytes in {_HEAD_LINES} lines; send fewer headers"
_FULL = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, _TOO_MANY, "retry-after: 1")
_LONG_HEAD = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG)
_TWO_LENGTHS = _refusal(
    HTTPStatus.BAD_REQUEST, "content-length and transfer-encoding exclude each other; send one of them"
)


def _ok_lines(cycle: RequestResponseCycle, headers: Headers) -> bytes:
    """Of the head of a 200, up to the last header."""
    return b"HTTP/1.1 200 OK\r\n" + b"".join(b"%b: %b\r\n" % one for one in (*cycle.default_headers, *headers))


def most_connections(asked: int | None) -> int:
    """The connection limit within `ulimit -n`, less spare descriptors for files; InputError if `asked` is above."""
    free = _num_free_descriptors() - _SPARE
    if free < 1 or (asked or 1) > free:
        wanted = 1 if asked is None else asked
        raise InputError(
            f"{wanted} connections need {wanted - free} file descriptors more than this process may open; "
            "raise the limit (ulimit -n) or lower --max-connections"
        )
    return min(_DEFAULT, free) if asked is None else asked


def _num_free_descriptors() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 20
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return (1 << 20) - _SPARE
    with suppress(OSError):
        return most - len(os.listdir("/proc/self/fd"))
    return most - 32


@dataclass
class ConnectionLimit:
    """Shared by all connections of a server: `most` are served, up to _MOST_REFUSED more get a 503, others a reset."""

    limits: Limits
    most: int
    refused: set[Connection] = field(default_factory=set)


class Timer:
    """Calls `act` once, `seconds` after `start`, unless `stop` comes first."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._seconds, self._act = seconds, act
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """No effect while it runs: trickling bytes do not extend a time-out (slowloris)."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Chunks:
    """The chunked body of one response. As `cycle.send`, without h11, whose chunks are the same bytes."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self._flow, self._transport = connection.flow, connection.transport
        self._held: list[bytes] = []  # chunks that the next turn of the event loop writes
        self.fd: int = self._transport.get_extra_info("socket").fileno()

    @property
    def is_clear(self) -> bool:
        """Whether all that was written is sent, and more can be."""
        transport = self._transport
        is_sent = not (self._held or transport.get_write_buffer_size())
        return is_sent and not (transport.is_closing() or self._cycle.disconnected)

    def chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def write(self, data: bytes) -> None:
        """Whole chunks, or the rest of one."""
        self._transport.write(data)

    def begin(self, headers: Headers) -> None:
        """The head of a 200, in one write with what is sent next."""
        if self._cycle.disconnected:
            return
        _, _, framing = self._connection.begin(self._cycle, _CHUNKED).partition(b"\r\n")
        self._hold(_ok_lines(self._cycle, headers) + framing)

    async def send(self, data: bytes) -> None:
        """As a chunk, once the client has read those before it."""
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if data and not self._cycle.disconnected:
            self._hold(self.chunk(data))

    def _hold(self, data: bytes) -> None:
        if not self._held:
            asyncio.get_running_loop().call_soon(self._write_held)
        self._held.append(data)

    def _write_held(self) -> None:
        if self._held and not self._cycle.disconnected:
            self.write(b"".join(self._held))
        self._held.clear()

    def end(self) -> None:
        """Behind what was sent, in the same write."""
        if not self._cycle.disconnected:
            self._held.append(self._connection.conn.send(_END) or b"")
            self._write_held()
            self._connection.complete(self._cycle)


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with header and write time-outs and a connection limit."""

    def __init__(self, *args: Any, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self._head = Timer(limit.limits.header_s, lambda: self.transport.close())
        self._unread = Timer(limit.limits.write_s, lambda: self.transport.abort())
        self._refusal = Timer(_REFUSED_S, lambda: self.transport.abort())
        self._disconnect: Disconnect | None = None  # of the latest request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limit.most:
            self._refuse(transport)
            return
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing is then called for every unread byte
        self._head.start()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Send a 503 and keep reading for a moment: closing over unread bytes resets the connection and loses it."""
        self.transport = transport
        if len(self._limit.refused) >= _MOST_REFUSED:
            transport.abort()
            return
        self._limit.refused.add(self)
        self._refusal.start()
        transport.write(_FULL)

    def data_received(self, data: bytes) -> None:
        if self in self._limit.refused or self.transport.is_closing():
            return
        if not self._takes_head(data):
            return
        super().data_received(data)
        if not self._takes_head(b""):  # a pipelined request in the same bytes
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._head.stop()
        else:  # part of the headers, or of the body of a request that is answered already
            self._head.start()

    def handle_events(self) -> None:
        """An HTTP/1.1 response of unknown length is chunked: its handler may write chunks to the connection. Others
        may be written as a whole."""
        super().handle_events()
        if self.cycle is None or ANSWER_WRITER in self.scope:
            return
        self._disconnect = Disconnect(self.flow.resume_reading)
        self.scope[DISCONNECT] = self._disconnect  # type: ignore[literal-required]
        if absolute := _ABSOLUTE.match(self.scope["raw_path"]):  # as clients of a proxy send it
            self.scope["raw_path"] = self.scope["raw_path"][absolute.end() :] or b"/"
            self.scope["path"] = unquote(self.scope["raw_path"].decode("ascii"))
        self.scope[ANSWER_WRITER] = partial(self._write_answer, self.cycle)  # type: ignore[literal-required]
        self.scope[OK_WRITER] = partial(self._write_ok, self.cycle)  # type: ignore[literal-required]
        if self.scope["http_version"] == "1.1":
            self.scope[CHUNKS] = Chunks(self, self.cycle)  # type: ignore[literal-required]

    async def _write_answer(self, cycle: RequestResponseCycle, head: bytes, body: bytes) -> None:
        """As two `cycle.send`, in one write. `head`: lines up to the last header, by a server that has checked them;
        h11 is told of an empty answer, and says whether the connection ends."""
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return
        self.begin(cycle, _ANSWER)
        self.conn.send(_END)
        is_last = self.conn.our_state is h11.MUST_CLOSE or not cycle.keep_alive
        self.transport.write(b"%bconnection: close\r\n\r\n%b" % (head, body) if is_last else b"%b\r\n%b" % (head, body))
        self.complete(cycle)

    async def _write_ok(self, cycle: RequestResponseCycle, headers: Headers, body: bytes) -> None:
        """As `_write_answer`, of a 200."""
        await self._write_answer(cycle, _ok_lines(cycle, headers), body)

    def begin(self, cycle: RequestResponseCycle, response: h11.Response) -> bytes:
        """A response begins whose head the caller writes; h11 is told of a plain one, and returns its head."""
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        return self.conn.send(response) or b""

    def complete(self, cycle: RequestResponseCycle) -> None:
        """The whole response is written, and h11 has been told so."""
        cycle.response_complete = True
        cycle.message_event.set()
        if self.conn.our_state is h11.MUST_CLOSE or not cycle.keep_alive:
            self.conn.send(h11.ConnectionClosed())
            self.transport.close()
        cycle.on_response()

    def _takes_head(self, data: bytes) -> bool:
        """Check bytes that would be parsed as headers; a refusal closes the connection."""
        if self.conn.their_state not in (h11.IDLE, h11.DONE):
            return True
        head, _, _ = (self.conn.trailing_data[0] + data).partition(b"\r\n\r\n")
        if len(head) > _HEAD_BYTES or head.count(b"\n") >= _HEAD_LINES:
            return self._end(_LONG_HEAD)
        if all(pattern.search(head) for pattern in _FRAMED):  # request smuggling past a proxy
            return self._end(_TWO_LENGTHS)
        return True

    def _end(self, answer: bytes) -> bool:
        self.transport.write(answer)
        self.transport.close()
        return False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are no HTTP request."""
        self._end(_refusal(HTTPStatus.BAD_REQUEST, f"{msg} Send HTTP/1.1."))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread, self._refusal):
            timer.stop()
        self._limit.refused.discard(self)
        super().connection_lost(exc)
        if self._disconnect is not None:
            self._disconnect.happen()
