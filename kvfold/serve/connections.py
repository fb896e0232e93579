"""Connections of the HTTP server: how long a client may take to send a request's head or to take its answer, and how
many clients there may be.

    connected …… head has come …… answered …… next head begins …… head has come
    |  header_s  |                | keep-alive |     header_s     |
                     | write_s: whenever the client does not take what was written |

uvicorn bounds how long an idle connection is kept alive, and nothing else of these.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvfold.errors import InputError, MissingExtra
from kvfold.serve.settings import Limits

try:
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error

BACKLOG = 64  # connections that are accepted at once, before any is looked at
_MOST_REFUSED = 32  # that are still reading why
_SPARE = BACKLOG + _MOST_REFUSED + 32  # descriptors for these, and for files of the store
_DEFAULT = 1024
_REFUSED_S = 1.0  # to read why
_MESSAGE = "the server has as many connections as it takes; try again later"
_BODY = json.dumps({
    "type": "error",
    "error": {"type": "overloaded_error", "message": _MESSAGE, "param": None, "code": None},
}).encode()  # fmt: skip
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def most_connections(asked: int | None) -> int:
    """So many that descriptors are left for everything else; InputError if more are asked for than there are."""
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
    except ImportError:  # Windows counts them otherwise
        return 1 << 20
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (1 << 20) - _SPARE if most == resource.RLIM_INFINITY else most - _num_open()


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 32


@dataclass
class Door:
    """What all connections of a server share: `most` are let in; a few more are told why not."""

    limits: Limits
    most: int
    refused: set[Connection] = field(default_factory=set)


class Timer:
    """Calls something once, so many seconds after it was started, unless it is stopped before."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._seconds, self._act = seconds, act
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Nothing happens if it runs already: bytes that trickle in do not put it off."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """uvicorn's, with time-outs for the head and for what is written, and a bound on their number."""

    def __init__(self, *args: Any, door: Door, **options: Any) -> None:
        super().__init__(*args, **options)
        self._door = door
        self._head = Timer(door.limits.header_s, lambda: self.transport.close())
        self._unread = Timer(door.limits.write_s, lambda: self.transport.abort())
        self._refusal = Timer(_REFUSED_S, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._door.most:
            self._refuse(transport)
            return
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing then tells of every byte that is not taken
        self._head.start()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Say why, and read on for a moment: an answer is lost if its connection is closed over unread bytes."""
        self.transport = transport
        if len(self._door.refused) >= _MOST_REFUSED:
            transport.abort()
            return
        self._door.refused.add(self)
        self._refusal.start()
        transport.write(_REFUSAL)

    def data_received(self, data: bytes) -> None:
        if self in self._door.refused:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head.stop()
        else:  # part of a head, or of the body of a request that is answered already
            self._head.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread, self._refusal):
            timer.stop()
        self._door.refused.discard(self)
        super().connection_lost(exc)
