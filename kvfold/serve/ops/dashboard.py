"""The dashboard at the server's root: static files, and JSON of load, tiers and the tenant's recent requests.

The static files are public; the JSON needs the API key where the server has keys, and shows that key's tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvfold import __version__
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.strict_json import Json
from kvfold.serve.middleware import RequestMiddleware
from kvfold.serve.ops.recent_requests import SAMPLE_S, RecentRequests, percentiles
from kvfold.serve.ops.request_trace import RequestTrace
from kvfold.serve.service import Service
from kvfold.store.store import PrefixStore

MAX_AGE_S = 5.0  # of counted bytes
_ASSETS = ("style.css", "script.js", "charts.js")
FILES = {"/": "index.html", **{f"/dashboard/{name}": name for name in _ASSETS}}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PRIVATE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Dashboard:
    """Endpoints by path."""

    def __init__(self, service: Service, middleware: RequestMiddleware) -> None:
        self._service, self._middleware = service, middleware
        self._tier_usage = TierUsage(service.store)
        page = files("kvfold.serve.ops") / "page"
        self._files = {name: (page / name).read_text(encoding="utf-8") for name in FILES.values()}

    @property
    def handlers(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        shown = {path: partial(self._file, name) for path, name in FILES.items()}
        return {**shown, "/dashboard/state": self._state, "/dashboard/kept/{id}": self._kept}

    async def _file(self, name: str, request: Request) -> Response:
        kind = _TYPES[name.rsplit(".", 1)[1]]
        return Response(self._files[name], media_type=kind, headers=PAGE_HEADERS)

    async def _state(self, request: Request) -> Response:
        tenant = self._middleware.tenant(request)
        recent, scheduler = self._service.recent(tenant), self._service.scheduler
        now = recent.sample(scheduler.num_running, scheduler.num_waiting)
        found = {**await self._server(), "tenant": tenant, "history": [*recent.history, now], **totals(recent)}
        found |= {"requests": [_row(trace) for trace in recent.listed()]}
        return JSONResponse({**found, **samples(recent, request)}, headers=_PRIVATE)

    async def keep_history(self) -> None:
        """Sample every tenant's state, until it is cancelled."""
        service = self._service
        while True:
            for recent in service.recents.values():
                recent.history.append(recent.sample(service.scheduler.num_running, service.scheduler.num_waiting))
            await asyncio.sleep(SAMPLE_S)

    async def _kept(self, request: Request) -> Response:
        trace = self._service.recent(self._middleware.tenant(request)).find(request.path_params["id"])
        if trace is None or trace.kept is None:
            raise ApiError(404, "that request is not among the recent ones, or its prompt was not prefilled")
        kept = trace.kept
        return JSONResponse({"id": trace.id, "num_tokens": kept.num_tokens, "slots": kept.slots}, headers=_PRIVATE)

    async def _server(self) -> Json:
        service = self._service
        scheduler, policy, (held_bytes, limit_bytes) = service.scheduler, service.policy, service.held_bytes()
        facts = {"model": service.settings.names[0], "policy": policy.short, "version": __version__}
        load = {"evicts": policy.prefill.evicts, "running": scheduler.num_running, "waiting": scheduler.num_waiting}
        held = {"bytes": held_bytes, "limit_bytes": limit_bytes}
        events, tiers = {} if service.store is None else service.store.counters(), await self._tier_usage.read()
        found = [{"name": name, "bytes": size, "hits": events.get(f"hit.{name}", 0)} for name, size in tiers.items()]
        return {**facts, **load, "no_reuse": service.no_reuse, "arena": held, "tiers": found}


def totals(recent: RecentRequests) -> Json:
    """Of a tenant's requests since the start."""
    usd = None if recent.price is None else {"cost": recent.cost_usd, "saved": recent.saved_usd}
    return {
        "done": recent.num_done,
        "refused": recent.num_refused,
        "tokens": {name: recent.tokens[name] for name in ("input", "reused", "output")},
        "lookups": recent.lookups,
        "usd": usd,
        "first_token_ms": percentiles(recent.first_token_ms),
        "token_ms": percentiles(recent.token_ms),
    }


def samples(recent: RecentRequests, request: Request) -> Json:
    """What percentiles are taken of, for a proxy that takes them of several servers and asks with `samples=all`."""
    if request.query_params.get("samples") != "all":
        return {}
    return {"first_token_samples_ms": [*recent.first_token_ms], "token_samples_ms": [*recent.token_ms]}


def _row(trace: RequestTrace) -> Json:
    now = "done" if trace.done is not None else _stage(trace)
    kept = None if trace.kept is None else trace.kept.share
    return {**trace.facts(), "at": trace.at, "now": now, "lookup": trace.lookup, "kept": kept}


def _stage(trace: RequestTrace) -> str:
    """The stage of a running request."""
    if trace.first_token is not None:
        return "decode"
    if trace.scheduled is not None:
        return "prefill"
    return "queue" if trace.queued is not None else "reading"


class TierUsage:
    """Bytes by tier, fastest first, counted in a thread and cached, since counting a folder is slow; None for tiers
    that do not count, such as Redis."""

    def __init__(self, store: PrefixStore | None, max_age_s: float = MAX_AGE_S) -> None:
        self._store, self._max_age_s = store, max_age_s
        self._counted_at: float | None = None
        self._found: dict[str, int | None] = {}

    async def read(self) -> dict[str, int | None]:
        """At most `max_age_s` old."""
        if self._counted_at is None or time.monotonic() - self._counted_at > self._max_age_s:
            self._counted_at = time.monotonic()
            self._found = await asyncio.to_thread(self._count)
        return self._found

    def _count(self) -> dict[str, int | None]:
        found, store = dict(self._found), self._store
        tiers: list[Any] = [] if store is None else [store.device, *store.tiered.tiers]
        for tier in (tier for tier in tiers if tier is not None):
            with suppress(OSError):  # a file was deleted meanwhile: keep the previous count
                found[tier.name] = getattr(tier, "num_bytes", None)
        return found
