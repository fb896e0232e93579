"""The proxy before the replicas: requests and answers pass unchanged, streams piece by piece.

A request whose answer breaks off before anything of it was sent goes to the next replica, once. A client that leaves
ends its request at the replica. /metrics, /health, /ready, the dashboard and statistics are those of all replicas.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import error_response
from kvfold.serve.auth import tenant_of
from kvfold.serve.ops.metrics import CONTENT_TYPE, Metrics
from kvfold.serve.replicas.combine import (
    MetricsSum,
    combined_health,
    combined_state,
    combined_stats,
    without_samples,
)
from kvfold.serve.replicas.fleet import Fleet, Replica
from kvfold.serve.replicas.routing import Backend, choices, route_key
from kvfold.serve.replicas.upstream import Unreachable, Upstream, end_to_end, fetch
from kvfold.serve.settings import Settings

ATTEMPTS = 2
REPLICA_HEADER = b"x-kvfold-replica"
_ASK_ALL_S = 5.0
_WATCH_AFTER_S = 0.05
_INLINE_BYTES = 256 << 10  # JSON this short is decoded in the event loop
_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
Together = Callable[[dict[int, Answer]], Response]


class _ClientGone(Exception):
    pass


class Proxy:
    """An ASGI application."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet, self._settings = fleet, settings
        self._metrics, self._sum = Metrics(histograms=()), MetricsSum()
        self._metrics.add("kvfold_proxy_retries_total", 0)  # alerts need a series that is there before the first one
        self.is_closing = False
        self._together: dict[tuple[str, str], tuple[Together, bytes]] = {
            ("GET", "/metrics"): (self._all_metrics, b""),
            ("GET", "/health"): (self._all_health, b""),
            ("GET", "/ready"): (self._all_ready, b""),
            ("GET", "/dashboard/state"): (_all_states, b"samples=all"),
            ("POST", "/v1/kvfold/stats"): (_all_stats, b"samples=all"),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request; its own errors are in the client's format."""
        request = Request(scope, receive)
        try:
            body = await self._body(request)
            response = await self._answer(request, body, receive, send)
        except _ClientGone:
            return
        except ApiError as error:
            request_id = f"req_{secrets.token_hex(12)}"
            response = error_response(request, error, request_id)
            response.headers["request-id"] = response.headers["x-request-id"] = request_id
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request, body: bytearray | None, receive: Any, send: Any) -> Response | None:
        """None: it has been sent."""
        scope = request.scope
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        together = self._together.get((method, scope["path"]))
        if together is not None and body is not None:
            combine, query = together
            return combine(await self._ask_all(scope, body, query))
        if scope["path"].startswith("/dashboard/kept/"):
            return _first_found(await self._ask_all(scope, b"", b""))
        await self._forward(request, body, receive, send)
        return None

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
        raise ApiError(529, "no replica answers at present; try again later", retry_after_s=1)

    async def _try(self, backend: Backend, request: Request, body: bytearray | None, receive: Any, send: Any) -> bool:
        """False if nothing of an answer was sent."""
        upstream = Upstream(backend.socket, backend.links)
        watch = _DisconnectWatch(receive, upstream)
        backend.num_in_flight += 1
        try:
            head = await upstream.send(request.method, _target(request.scope), request.scope["headers"], body)
            headers = [*end_to_end(head.headers), (REPLICA_HEADER, b"%d" % backend.number)]
            start = {"type": "http.response.start", "status": head.status_code, "headers": headers}
            if _is_stream(headers):
                await send(start)
                await _pass_on(upstream, send)
            else:  # as a whole, so that one that breaks off can be tried again
                whole = b"".join([piece async for piece in upstream.pieces()])
                await send(start)
                await send({"type": "http.response.body", "body": whole})
            backend.num_sent += 1
            self._metrics.add("kvfold_proxy_requests_total", replica=str(backend.number))
            return True
        except Unreachable:
            if upstream.is_abandoned:
                raise _ClientGone from None
            return False
        finally:
            backend.num_in_flight -= 1
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

    # All replicas

    async def _ask_all(self, scope: Any, body: bytearray | bytes, query: bytes) -> dict[int, Answer]:
        """Of those that answer in time; HEAD is asked as GET, and the server leaves the body out."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        target = _target({**scope, "query_string": query or scope["query_string"]})

        async def ask(replica: Replica) -> Answer | None:
            try:
                return await fetch(replica.backend.socket, method, target, scope["headers"], body, _ASK_ALL_S)
            except Unreachable:
                return None

        asked = [replica for replica in self._fleet.replicas if replica.ready.is_set()]
        answers = await asyncio.gather(*map(ask, asked))
        return {
            replica.backend.number: answer for replica, answer in zip(asked, answers, strict=True) if answer is not None
        }

    def _all_metrics(self, answers: dict[int, Answer]) -> Response:
        if refused := _refused(answers):
            return refused
        pids = {replica.backend.number: replica.pid for replica in self._fleet.replicas}
        texts = {number: (pids[number], body.decode()) for number, (_, _, body) in answers.items()}
        gauges = ["# HELP kvfold_replica_up Whether a replica takes requests.", "# TYPE kvfold_replica_up gauge"]
        gauges += [f'kvfold_replica_up{{replica="{one.number}"}} {one.is_up:d}' for one in self._fleet.backends]
        gauges += ["# HELP kvfold_replica_starts_total Starts of a replica's process."]
        gauges += ["# TYPE kvfold_replica_starts_total counter"]
        for replica in self._fleet.replicas:
            gauges.append(f'kvfold_replica_starts_total{{replica="{replica.backend.number}"}} {replica.num_starts}')
        more = self._metrics.text() + "\n".join(gauges) + "\n"
        return PlainTextResponse(self._sum.text(texts, more), media_type=CONTENT_TYPE)

    def _all_health(self, answers: dict[int, Answer]) -> Response:
        found = {number: json.loads(body) for number, (_, _, body) in answers.items()}
        health, status = combined_health(found, len(self._fleet.replicas))
        return JSONResponse(health, status)

    def _all_ready(self, answers: dict[int, Answer]) -> Response:
        num_ready = sum(status == 200 for status, _, _ in answers.values())
        state = "closing" if self.is_closing else "running" if num_ready else "starting"
        is_ready = state == "running"
        found = {"ready": is_ready, "state": state, "replicas": len(self._fleet.replicas), "replicas_ready": num_ready}
        return JSONResponse(found, 200 if is_ready else 503)


def _all_states(answers: dict[int, Answer]) -> Response:
    if refused := _refused(answers):
        return refused
    states = [json.loads(body) for _, _, body in answers.values()]
    return JSONResponse(without_samples(combined_state(states)), headers=_NO_STORE)


def _all_stats(answers: dict[int, Answer]) -> Response:
    if refused := _refused(answers):
        return refused
    states = [json.loads(body) for _, _, body in answers.values()]
    return JSONResponse(without_samples({**states[0], **combined_stats(states)}))


def _refused(answers: dict[int, Answer]) -> Response | None:
    """The first answer that is no 200, as it is; an error if there is no answer."""
    if not answers:
        raise ApiError(529, "no replica answers at present; try again later", retry_after_s=1)
    return next((_as_response(answer) for answer in answers.values() if answer[0] != 200), None)


def _first_found(answers: dict[int, Answer]) -> Response:
    """A 200 if one replica has it."""
    if not answers:
        raise ApiError(529, "no replica answers at present; try again later", retry_after_s=1)
    return _as_response(min(answers.values(), key=lambda answer: answer[0]))


def _as_response(answer: Answer) -> Response:
    status, headers, body = answer
    response = Response(body, status)
    response.raw_headers = headers
    return response


def _target(scope: Any) -> bytes:
    """The path and query as the client sent them."""
    query = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return Headers(raw=headers).get("content-type", "").startswith("text/event-stream")


async def _pass_on(upstream: Upstream, send: Callable[[Any], Awaitable[None]]) -> None:
    """A stream of events; one that breaks off between two of them ends with an error event."""
    last = b""
    try:
        async for piece in upstream.pieces():
            last = piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except Unreachable:
        if upstream.is_abandoned or not last.endswith(b"\n\n"):
            raise _ClientGone from None
        await send({"type": "http.response.body", "body": _BROKEN_OFF, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _broken_off() -> bytes:
    """Both vendors' clients raise it."""
    message = "the replica that wrote this reply ended; send the request again"
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
