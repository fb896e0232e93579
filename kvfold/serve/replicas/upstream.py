"""One request from the proxy to a replica, over a connection to its Unix socket that is kept for the next request.

A kept connection may be closed by the replica just when it is used again; the request is then sent over a new one.
Requests come parsed and checked from the proxy's own server, so that their head is only joined; answers are those of
a replica, framed by their length, in chunks, or by the end of the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

Headers = list[tuple[bytes, bytes]]
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_REFRAMED = _HOP_BY_HOP | {b"content-length", b"expect"}
_PIECE_BYTES = 64 << 10
_IDLE_S = 3.0  # replicas close a connection after 5 s without a request
_MAX_IDLE = 16  # connections to one replica
NO_BODY = (204, 304)
_BROKEN = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)  # EOFError: also within what was awaited


class Unreachable(ConnectionError):
    """The replica broke the connection off, or never took it."""


class Silent(Unreachable):
    """The replica did not answer in time, and has not broken the connection off."""


class Head(NamedTuple):
    """Of an answer; names are lower case. `line`: the first one."""

    status_code: int
    headers: Headers
    line: bytes = b""

    def get(self, name: bytes) -> bytes:
        return next((value.lower() for found, value in self.headers if found == name), b"")


@dataclass(eq=False)
class Link:
    """A connection to a socket, on which answers follow requests one by one."""

    socket: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    @staticmethod
    async def open(socket: str) -> Link:
        return Link(socket, *await asyncio.open_unix_connection(socket, limit=_PIECE_BYTES))

    @property
    def is_usable(self) -> bool:
        """Whether the replica has not closed it, nor is about to."""
        is_young = time.monotonic() - self.idle_since < _IDLE_S
        return is_young and not self.reader.at_eof() and not self.writer.is_closing()

    async def read_head(self) -> Head:
        """ValueError if it is none; those before the last one (1xx) are skipped."""
        while True:
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            version, status, *_ = first.split(b" ", 2)
            if not version.startswith(b"HTTP/1."):
                raise ValueError("this is no HTTP")
            if int(status) >= 200:
                return Head(int(status), [_header(line) for line in lines], first)

    async def read_body(self, head: Head, method: str) -> AsyncIterator[bytes]:
        """Pieces as they come, to the end of this answer."""
        if method == "HEAD" or head.status_code in NO_BODY:
            return
        if head.get(b"transfer-encoding") == b"chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                async for piece in self._read(size):
                    yield piece
                await self.reader.readexactly(2)
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif length := head.get(b"content-length"):
            async for piece in self._read(int(length)):
                yield piece
        else:
            while piece := await self.reader.read(_PIECE_BYTES):
                yield piece

    async def read_whole(self, head: Head, method: str) -> bytes:
        """Without steps in between where the head tells the length."""
        length = head.get(b"content-length")
        if not length or method == "HEAD" or head.status_code in NO_BODY or head.get(b"transfer-encoding"):
            return b"".join([piece async for piece in self.read_body(head, method)])
        return await self.reader.readexactly(int(length))

    async def _read(self, left: int) -> AsyncIterator[bytes]:
        while left > 0:
            piece = await self.reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise EOFError("the connection was closed")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.writer.transport.abort()


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon:
        raise ValueError("this is no header")
    return name.lower(), value.strip()


class Links:
    """Connections to one replica that no request uses, newest last."""

    def __init__(self) -> None:
        self._idle: list[Link] = []

    def take(self, socket: str) -> Link | None:
        """A replica that was started again listens at another socket."""
        while self._idle:
            link = self._idle.pop()
            if link.socket == socket and link.is_usable:
                return link
            link.close()
        return None

    def keep(self, link: Link) -> None:
        """For the next request; its last answer has been read to the end."""
        link.idle_since = time.monotonic()
        self._idle.append(link)
        while len(self._idle) > _MAX_IDLE or not self._idle[0].is_usable:
            self._idle.pop(0).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Upstream:
    """`close` may be called at any time, also while another task reads. Without `links` the connection is for this
    request alone."""

    def __init__(self, socket: str, links: Links | None = None) -> None:
        self._socket, self._links = socket, links
        self._link: Link | None = None
        self._head, self._method, self._is_last = Head(0, []), "", True
        self.is_closed = False
        self.is_abandoned = False  # its client has left

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes | bytearray | None) -> Head:
        """The head of the answer; Unreachable if there is none. `body` None: as the headers say, and not sent, for a
        request that is refused by its head."""
        dropped, self._method = _HOP_BY_HOP if body is None else _REFRAMED, method
        passed = _hosted([one for one in headers if one[0] not in dropped])
        self._is_last = body is None or self._links is None
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % one for one in passed)]
        lines += [] if body is None else [b"content-length: %d" % len(body)]
        lines += [b"connection: close"] if self._is_last else []
        request = b"\r\n".join((*lines, b"", body or b""))
        kept = None if self._is_last or self._links is None else self._links.take(self._socket)
        if kept is not None:
            with suppress(Unreachable):
                return await self._ask(kept, request)
            if self.is_closed:
                raise Unreachable("closed")
        try:
            link = await Link.open(self._socket)
        except OSError as error:
            raise Unreachable(str(error)) from error
        return await self._ask(link, request)

    async def _ask(self, link: Link, request: bytes) -> Head:
        self._link = link
        try:
            if self.is_closed:
                raise EOFError("closed")
            link.writer.write(request)
            self._head = await link.read_head()
            return self._head
        except _BROKEN as error:
            link.close()
            raise Unreachable(str(error)) from error
        except BaseException:
            link.close()
            raise

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; Unreachable if it breaks off."""
        assert self._link is not None
        try:
            async for piece in self._link.read_body(self._head, self._method):
                yield piece
            self._keep(self._link)
        except _BROKEN as error:
            raise Unreachable(str(error)) from error
        finally:
            self.close()

    async def whole(self) -> bytes:
        """The body; Unreachable if it breaks off."""
        assert self._link is not None
        try:
            found = await self._link.read_whole(self._head, self._method)
            self._keep(self._link)
            return found
        except _BROKEN as error:
            raise Unreachable(str(error)) from error
        finally:
            self.close()

    def _keep(self, link: Link) -> None:
        """For the next request, if this answer ended as it says."""
        if self._links is not None and self._can_be_kept:
            self._link = None
            self._links.keep(link)

    @property
    def has_answered(self) -> bool:
        """Whether the head of the answer has come."""
        return self._head.status_code > 0

    @property
    def _can_be_kept(self) -> bool:
        is_framed = self._head.get(b"content-length") or self._head.get(b"transfer-encoding")
        return (
            bool(is_framed) and not self._is_last and not self.is_closed and self._head.get(b"connection") != b"close"
        )

    def close(self) -> None:
        """The replica sees its client go, and ends the request."""
        self.is_closed = True
        if self._link is not None:
            self._link.close()


def _hosted(headers: Headers) -> Headers:
    """HTTP/1.0 clients may send no host, and HTTP/1.1 requires one."""
    return headers if any(name == b"host" for name, _ in headers) else [(b"host", b"kvfold"), *headers]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of an answer that are for the client."""
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP]


async def fetch(
    socket: str,
    method: str,
    target: bytes,
    headers: Headers,
    body: bytes | bytearray,
    timeout_s: float,
    links: Links | None = None,
) -> tuple[int, Headers, bytes]:
    """A whole answer; Silent if it does not come in time, Unreachable if it never will."""
    upstream = Upstream(socket, links)
    try:
        async with asyncio.timeout(timeout_s):
            head = await upstream.send(method, target, headers, body)
            found = await upstream.whole()
    except TimeoutError:
        raise Silent(f"no answer within {timeout_s:g} s") from None
    finally:
        upstream.close()
    return head.status_code, end_to_end(head.headers), found
