"""A page at the server's root that shows what it does: files of the package, and the state that its script asks for.

The page itself says nothing; what it shows demands the API key where the server has keys, and is the key's tenant's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files

from kvfold import __version__
from kvfold.errors import MissingExtra
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import Json
from kvfold.serve.middleware import Guard
from kvfold.serve.ops.recent_requests import Percentiles, Recent, percentiles
from kvfold.serve.ops.request_trace import Trail
from kvfold.serve.ops.tier_usage import Holdings
from kvfold.serve.service import Service

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error

FILES = {"/": "index.html", "/dashboard/style.css": "style.css", "/dashboard/script.js": "script.js"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PRIVATE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Dashboard:
    """Endpoints by path."""

    def __init__(self, service: Service, guard: Guard) -> None:
        self._service, self._guard = service, guard
        self._holdings = Holdings(service.store)
        page = files("kvfold.serve.ops") / "page"
        self._files = {name: (page / name).read_text(encoding="utf-8") for name in FILES.values()}

    @property
    def handlers(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        shown = {path: partial(self._file, name) for path, name in FILES.items()}
        return {**shown, "/dashboard/state": self._state, "/dashboard/kept/{id}": self._kept}

    async def _file(self, name: str, request: Request) -> Response:
        kind = _TYPES[name.rsplit(".", 1)[1]]
        return Response(self._files[name], media_type=kind, headers=_HEADERS)

    async def _state(self, request: Request) -> Response:
        recent = self._service.recent(self._guard.tenant(request))
        return JSONResponse({**await self._server(), **_requests(recent)}, headers=_PRIVATE)

    async def _kept(self, request: Request) -> Response:
        trail = self._service.recent(self._guard.tenant(request)).find(request.path_params["id"])
        if trail is None or trail.kept is None:
            raise ApiError(404, "that request is not among the latest, or its prompt was never read")
        kept = trail.kept
        return JSONResponse({"id": trail.id, "num_tokens": kept.num_tokens, "slots": kept.slots}, headers=_PRIVATE)

    async def _server(self) -> Json:
        service = self._service
        arena, scheduler = service.model.arena, service.scheduler
        facts = {"model": service.settings.names[0], "policy": service.policy.short, "version": __version__}
        load = {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
        held = {"bytes": arena.capacity_bytes - arena.free_bytes, "limit_bytes": arena.capacity_bytes}
        events, tiers = {} if service.store is None else service.store.counters(), await self._holdings.read()
        found = [{"name": name, "bytes": size, "hits": events.get(f"hit.{name}", 0)} for name, size in tiers.items()]
        return {**facts, **load, "no_reuse": service.no_reuse, "arena": held, "tiers": found}


def _requests(recent: Recent) -> Json:
    usd = None if recent.price is None else {"cost": recent.cost_usd, "saved": recent.saved_usd}
    return {
        "done": recent.num_done,
        "refused": recent.num_refused,
        "tokens": {name: recent.tokens[name] for name in ("input", "reused", "output")},
        "lookups": recent.lookups,
        "usd": usd,
        "first_token_ms": _shown(percentiles(recent.first_token_ms)),
        "token_ms": _shown(percentiles(recent.token_ms)),
        "requests": [_row(trail) for trail in recent.listed()],
    }


def _shown(found: Percentiles | None) -> Json | None:
    return None if found is None else found._asdict()


def _row(trail: Trail) -> Json:
    now = "done" if trail.done is not None else _stage(trail)
    return {**trail.facts(), "at": trail.at, "now": now, "lookup": trail.lookup, "has_map": trail.kept is not None}


def _stage(trail: Trail) -> str:
    """Where a request is that is not over."""
    if trail.began is not None:
        return "decode"
    if trail.let_in is not None:
        return "prefill"
    return "queue" if trail.queued is not None else "reading"
