"""Answers of all replicas as one: /metrics, /health, /ready, the dashboard and statistics.

Replicas that are up are asked at once, and not waited for: what one does not say in time is marked as missing, and of
one whose health check failed the last known state counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvfold.serve.api.errors import ApiError
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
from kvfold.serve.replicas.upstream import Unreachable, fetch
from kvfold.serve.settings import Settings

HEALTH_S, ASK_S = 0.5, 2.0  # for a replica to answer
_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_KEPT = "/dashboard/kept/"
Answers = dict[int, tuple[int, list[tuple[bytes, bytes]], bytes]]  # replica -> status, headers, body


class _Route(NamedTuple):
    combine: Callable[[Request, Answers], Response]
    query: bytes = b""  # asked for instead of the client's


class Together:
    """`metrics`: of the proxy."""

    def __init__(self, fleet: Fleet, settings: Settings, metrics: Metrics) -> None:
        self._fleet, self._settings, self._metrics = fleet, settings, metrics
        self._sum = MetricsSum()
        self.is_closing = False
        self._routes = {
            ("GET", "/metrics"): _Route(self._all_metrics),
            ("GET", "/health"): _Route(self._all_health),
            ("GET", "/dashboard/state"): _Route(self._all_states, b"samples=all"),
            ("POST", "/v1/kvfold/stats"): _Route(self._all_stats, b"samples=all"),
        }

    async def answer(self, request: Request, body: bytearray | None) -> Response | None:
        """None: one replica answers this request."""
        scope = request.scope
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"]
        if (method, path) == ("GET", "/ready"):
            return self._ready()
        route = self._routes.get((method, path))
        if route is not None and body is not None:
            timeout_s = HEALTH_S if path == "/health" else ASK_S
            return route.combine(request, await self._ask(scope, method, body, route.query, timeout_s))
        if path.startswith(_KEPT):
            return _first_found(await self._ask(scope, method, b"", b"", ASK_S))
        return None

    async def _ask(self, scope: Any, method: str, body: bytearray | bytes, query: bytes, timeout_s: float) -> Answers:
        """Of those that are up and answer in time; HEAD is asked as GET, and the server leaves the body out."""
        target = target_of({**scope, "query_string": query or scope["query_string"]})

        async def ask(replica: Replica) -> Any:
            try:
                return await fetch(replica.backend.socket, method, target, scope["headers"], body, timeout_s)
            except Unreachable:
                return None

        asked = [replica for replica in self._fleet.replicas if replica.backend.is_up]
        answers = await asyncio.gather(*map(ask, asked))
        return {
            replica.backend.number: answer for replica, answer in zip(asked, answers, strict=True) if answer is not None
        }

    def _missing(self, answers: Answers) -> list[int]:
        return [backend.number for backend in self._fleet.backends if backend.number not in answers]

    def _all_metrics(self, request: Request, answers: Answers) -> Response:
        tenant_of(request.headers, self._settings.tenants, self._settings.proxy_digest)
        pids = {replica.backend.number: replica.pid for replica in self._fleet.replicas}
        texts = {
            number: (pids[number], body.decode()) for number, (status, _, body) in answers.items() if status == 200
        }
        are_up = {backend.number: int(backend.is_up) for backend in self._fleet.backends}
        have_answered = {number: int(number in texts) for number in are_up}
        starts = {replica.backend.number: replica.num_starts for replica in self._fleet.replicas}
        more = self._metrics.text()
        more += _by_replica("kvfold_replica_up", "gauge", "Whether a replica takes requests.", are_up)
        about = "Whether a replica answered; if not, its last counters are in the sums."
        more += _by_replica("kvfold_replica_answered", "gauge", about, have_answered)
        more += _by_replica("kvfold_replica_starts_total", "counter", "Starts of a replica's process.", starts)
        return PlainTextResponse(self._sum.text(texts, more), media_type=CONTENT_TYPE)

    def _all_health(self, request: Request, answers: Answers) -> Response:
        try:
            tenant_of(request.headers, self._settings.tenants, self._settings.proxy_digest)
            is_known = True
        except ApiError:
            is_known = False
        found = {number: json.loads(body) for number, (_, _, body) in answers.items()}
        health, status = combined_health(found, [backend.is_up for backend in self._fleet.backends], is_known)
        return JSONResponse(health, status)

    def _ready(self) -> Response:
        num_ready = sum(backend.is_up for backend in self._fleet.backends)
        state = "closing" if self.is_closing else "running" if num_ready else "starting"
        is_ready = state == "running"
        found = {"ready": is_ready, "state": state, "replicas": len(self._fleet.replicas), "replicas_ready": num_ready}
        return JSONResponse(found, 200 if is_ready else 503)

    def _all_states(self, request: Request, answers: Answers) -> Response:
        if refused := _refused(answers):
            return refused
        state = combined_state([json.loads(body) for _, _, body in answers.values()])
        found = {**without_samples(state), "replicas_missing": self._missing(answers)}
        return JSONResponse(found, headers=_NO_STORE)

    def _all_stats(self, request: Request, answers: Answers) -> Response:
        if refused := _refused(answers):
            return refused
        states = [json.loads(body) for _, _, body in answers.values()]
        stats = without_samples({**states[0], **combined_stats(states)})
        return JSONResponse({**stats, "replicas_missing": self._missing(answers)})


def no_replica() -> ApiError:
    return ApiError(529, "no replica answers at present; try again later", retry_after_s=1)


def target_of(scope: Any) -> bytes:
    """The path and query as the client sent them."""
    query = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def _by_replica(name: str, kind: str, text: str, values: dict[int, int]) -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f'{name}{{replica="{number}"}} {value}' for number, value in values.items()]
    return "\n".join(lines) + "\n"


def _refused(answers: Answers) -> Response | None:
    """The first answer that is no 200, as it is; an error if there is no answer."""
    if not answers:
        raise no_replica()
    return next((_as_response(*answer) for answer in answers.values() if answer[0] != 200), None)


def _first_found(answers: Answers) -> Response:
    """A 200 if one replica has it."""
    if not answers:
        raise no_replica()
    return _as_response(*min(answers.values(), key=lambda answer: answer[0]))


def _as_response(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    response = Response(body, status)
    response.raw_headers = headers
    return response
