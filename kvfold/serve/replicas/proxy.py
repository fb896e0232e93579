"""The proxy before the replicas: requests and answers pass unchanged, streams piece by piece.

A request whose answer breaks off before anything of it was sent goes to the next replica, once; so does one whose
replica hangs. A client that leaves ends its request at the replica.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import error_response
from kvfold.serve.auth import tenant_of
from kvfold.serve.connections import ANSWER_WRITER
from kvfold.serve.ids import random_id
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.replicas.fleet import Fleet
from kvfold.serve.replicas.routing import Backend, choices, route_key
from kvfold.serve.replicas.together import Together, no_replica, target_of
from kvfold.serve.replicas.upstream import NO_BODY, Head, Unreachable, Upstream, end_to_end
from kvfold.serve.settings import Settings

ATTEMPTS = 2
REPLICA_HEADER = b"x-kvfold-replica"
_STREAM = b"text/event-stream"
_WATCH_AFTER_S = 0.05
_INLINE_BYTES = 256 << 10  # JSON this short is decoded in the event loop


class _ClientGone(Exception):
    pass


class Proxy:
    """An ASGI application."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet, self._settings = fleet, settings
        self._metrics = Metrics(histograms=())
        self._metrics.add("kvfold_proxy_retries_total", 0)  # alerts need a series that is there before the first one
        self.together = Together(fleet, settings, self._metrics)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request; its own errors are in the client's format."""
        request = Request(scope, receive)
        try:
            body = await self._body(request)
            response = await self.together.answer(request, body)
            if response is None:
                await self._forward(request, body, receive, send)
        except _ClientGone:
            return
        except ApiError as error:
            request_id = f"req_{random_id()}"
            response = error_response(request, error, request_id)
            response.headers["request-id"] = response.headers["x-request-id"] = request_id
        if response is not None:
            await response(scope, receive, send)

    # Bodies

    async def _body(self, request: Request) -> bytearray | None:
        """None if content-length is over the limit, which the replica tells. One that turns out to be longer is cut
        just behind the limit, for the replica to refuse."""
        length, most = request.headers.get("content-length", ""), self._fleet.body_bytes
        if length.isdecimal() and int(length) > most:
            return None
        found, body_s = bytearray(), self._settings.limits.body_s
        try:
            async with asyncio.timeout(body_s):
                while len(found) <= most:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    found += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body did not arrive within {body_s:g} s; send the request again"
            raise ApiError(408, text, headers={"connection": "close"}) from None
        del found[most + 1 :]
        return found

    # One replica

    async def _forward(self, request: Request, body: bytearray | None, receive: Any, send: Any) -> None:
        key = await self._key(request, body)
        tried: list[Backend] = []
        while len(tried) < ATTEMPTS:
            left = [backend for backend in choices(key, self._fleet.backends) if backend not in tried]
            if not left:
                break
            backend = left[0]
            tried.append(backend)
            if await self._try(backend, request, body, receive, send):
                return
            backend.links.close()
            backend.is_up = False  # until it answers /health
            self._metrics.add("kvfold_proxy_retries_total")
        raise no_replica()

    async def _try(self, backend: Backend, request: Request, body: bytearray | None, receive: Any, send: Any) -> bool:
        """False if nothing of an answer was sent."""
        upstream = Upstream(backend.socket, backend.links)
        watch = _DisconnectWatch(receive, upstream)
        backend.num_in_flight += 1
        backend.upstreams.add(upstream)
        try:
            head = await upstream.send(request.method, target_of(request.scope), request.scope["headers"], body)
            if head.get(b"content-type").startswith(_STREAM):
                await _pass_on(backend.number, head, upstream, send)
            else:  # as a whole, so that one that breaks off can be tried again
                whole = await upstream.whole()
                await request.scope[ANSWER_WRITER](_head_lines(backend.number, head, request.method, whole), whole)
            self._metrics.add("kvfold_proxy_requests_total", replica=str(backend.number))
            return True
        except Unreachable:
            if upstream.is_abandoned:
                raise _ClientGone from None
            return False
        finally:
            backend.num_in_flight -= 1
            backend.upstreams.discard(upstream)
            watch.cancel()
            upstream.close()

    async def _key(self, request: Request, body: bytearray | None) -> bytes:
        try:
            tenant = tenant_of(request.headers, self._settings.tenants, self._settings.proxy_digest)
        except ApiError:
            tenant = ""  # the replica refuses it
        if body is None or len(body) <= _INLINE_BYTES:
            return route_key(tenant, body or b"")
        return await asyncio.to_thread(route_key, tenant, body)


def _head_lines(number: int, head: Head, method: str, body: bytes) -> bytes:
    """Of an answer that is sent as a whole."""
    lines = [head.line, *(b"%b: %b" % one for one in end_to_end(head.headers)), b"%b: %d" % (REPLICA_HEADER, number)]
    if not head.get(b"content-length") and method != "HEAD" and head.status_code not in NO_BODY:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b""))


async def _pass_on(number: int, head: Head, upstream: Upstream, send: Callable[[Any], Awaitable[None]]) -> None:
    """A stream of events, of which nothing is sent before the first one came; one that breaks off between two of them
    ends with an error event."""
    pieces = upstream.pieces()
    last = await anext(pieces, b"")
    headers = [*end_to_end(head.headers), (REPLICA_HEADER, b"%d" % number)]
    await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": last, "more_body": True})
    try:
        async for last in pieces:
            await send({"type": "http.response.body", "body": last, "more_body": True})
    except Unreachable:
        if upstream.is_abandoned or not last.endswith(b"\n\n"):
            raise _ClientGone from None
        await send({"type": "http.response.body", "body": _BROKEN_OFF, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _broken_off() -> bytes:
    """Both vendors' clients raise it."""
    message = "the replica that wrote this reply ended or hangs; send the request again"
    error = {"type": "api_error", "message": message, "param": None, "code": None}
    return f"event: error\ndata: {json.dumps({'type': 'error', 'error': error})}\n\n".encode()


_BROKEN_OFF = _broken_off()


class _DisconnectWatch:
    """Closes the upstream when the client has left. It begins to look after a moment, since most answers are there by
    then, and a client that has left stays away."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], upstream: Upstream) -> None:
        self._receive, self._upstream = receive, upstream
        self._task: asyncio.Task[None] | None = None
        self._start = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._upstream.is_abandoned = True
        self._upstream.close()

    def cancel(self) -> None:
        self._start.cancel()
        if self._task is not None:
            self._task.cancel()
