"""One request from the proxy to a replica, over a connection of its own to the replica's Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import h11

Headers = list[tuple[bytes, bytes]]
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_REFRAMED = _HOP_BY_HOP | {b"content-length", b"expect"}
_PIECE_BYTES = 64 << 10


class Unreachable(ConnectionError):
    """The replica broke the connection off, or never took it."""


class Upstream:
    """`close` may be called at any time, also while another task reads."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._conn = h11.Connection(h11.CLIENT)
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self.is_closed = False
        self.is_abandoned = False  # its client has left

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes | bytearray | None) -> h11.Response:
        """The head of the answer; Unreachable if there is none. `body` None: as the headers say, and not sent, for a
        request that is refused by its head."""
        length = [] if body is None else [(b"content-length", b"%d" % len(body))]
        passed = [one for one in headers if one[0] not in (_HOP_BY_HOP if body is None else _REFRAMED)]
        request = h11.Request(
            method=method, target=target, headers=[*_hosted(passed), *length, (b"connection", b"close")]
        )
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(self._socket)
            if self.is_closed:
                raise Unreachable("closed")
            sent = self._conn.send(request) or b""
            if body is not None:
                sent += self._conn.send(h11.Data(data=bytes(body))) or b""
                sent += self._conn.send(h11.EndOfMessage()) or b""
            self._writer.write(sent)
            return await self._head()
        except (OSError, h11.RemoteProtocolError, EOFError) as error:
            self.close()
            raise Unreachable(str(error)) from error
        except BaseException:
            self.close()
            raise

    async def _head(self) -> h11.Response:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; Unreachable if it breaks off."""
        try:
            while not isinstance(event := await self._next(), h11.EndOfMessage):
                if isinstance(event, h11.Data) and event.data:
                    yield bytes(event.data)
        except (OSError, h11.RemoteProtocolError, EOFError) as error:
            raise Unreachable(str(error)) from error
        finally:
            self.close()

    async def _next(self) -> Any:
        assert self._reader is not None
        while (event := self._conn.next_event()) is h11.NEED_DATA:
            self._conn.receive_data(await self._reader.read(_PIECE_BYTES))
        if isinstance(event, h11.ConnectionClosed):
            raise EOFError("the connection was closed")
        return event

    def close(self) -> None:
        """The replica sees its client go, and ends the request."""
        self.is_closed = True
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.transport.abort()


def _hosted(headers: Headers) -> Headers:
    """HTTP/1.0 clients may send no host, and HTTP/1.1 requires one."""
    return headers if any(name == b"host" for name, _ in headers) else [(b"host", b"kvfold"), *headers]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of an answer that are for the client."""
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP]


async def fetch(
    socket: str, method: str, target: bytes, headers: Headers, body: bytes | bytearray, timeout_s: float
) -> tuple[int, Headers, bytes]:
    """A whole answer; Unreachable if it does not come in time."""
    upstream = Upstream(socket)
    try:
        async with asyncio.timeout(timeout_s):
            head = await upstream.send(method, target, headers, body)
            found = b"".join([piece async for piece in upstream.pieces()])
    except TimeoutError:
        raise Unreachable(f"no answer within {timeout_s:g} s") from None
    finally:
        upstream.close()
    return head.status_code, end_to_end(head.headers), found
