"""Around every request: an id, errors in the client's format, and a trail that is told about when it is over."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvfold.errors import MissingExtra
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import EventStream, as_api_error, error_response
from kvfold.serve.auth import tenant_of
from kvfold.serve.ops.request_log import log_trail
from kvfold.serve.ops.request_trace import Trail
from kvfold.serve.service import Service

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error

Handler = Callable[[Request], Awaitable[Response]]
OnDone = Callable[[Trail], None]


class Guard:
    """`on_done` is told of every request of the API that is over, in the server's loop."""

    def __init__(self, service: Service, on_done: OnDone) -> None:
        self._service, self._on_done = service, on_done

    def route(self, path: str, handler: Handler, methods: Sequence[str] = (), name: str = "") -> Route:
        """`methods`: without any, all; `name`: what the path is called in logs and metrics, one of ours, so that there
        are not many."""
        name = name or path

        async def guarded(request: Request) -> Response:
            parent = request.headers.get("traceparent")
            trail = Trail(f"req_{secrets.token_hex(12)}", request.method, name, parent=parent)
            request.state.trail, request.state.at = trail, self._service.clock()
            response = await self._answer(handler, methods, request, trail)
            response.headers["request-id"] = response.headers["x-request-id"] = trail.id
            trail.status = response.status_code
            self._service.metrics.add("kvfold_requests_total", path=name, status=str(trail.status))
            if isinstance(response, EventStream):
                response.then(partial(self._finish, trail))
            else:
                self._finish(trail)
            return response

        route = Route(path, guarded)
        route.methods = None  # a verb that the path does not take is told so in the client's format too
        return route

    async def _answer(self, handler: Handler, methods: Sequence[str], request: Request, trail: Trail) -> Response:
        try:
            _check_method(request, methods)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            told = as_api_error(error, trail.id)
            trail.why = told.logged
            return error_response(request, told, trail.id)

    def tenant(self, request: Request, *, is_listed: bool = False) -> str:
        """Who asks, by the API key; with `is_listed` the request is shown to them on the dashboard."""
        trail: Trail = request.state.trail
        trail.tenant = tenant_of(request.headers, self._service.settings.tenants)
        if is_listed:
            trail.is_listed = True
            self._service.recent(trail.tenant).enter(trail)
        return trail.tenant

    def is_known(self, request: Request) -> bool:
        """Whether the request has a key, or none is asked for."""
        try:
            self.tenant(request)
        except ApiError:
            return False
        return True

    def _finish(self, trail: Trail) -> None:
        trail.finish()
        if trail.tenant is not None and trail.is_listed:
            self._service.recent(trail.tenant).leave(trail)
        if trail.path.startswith("/v1/"):
            self._on_done(trail)
        is_poll = trail.path.startswith("/dashboard/") and trail.status == 200
        if not is_poll:
            log_trail(trail)


def _check_method(request: Request, methods: Sequence[str]) -> None:
    if methods and request.method not in methods:
        told = f"{request.scope['path'][:200]} takes {' and '.join(methods)}, not {request.method[:20]}"
        raise ApiError(405, told, headers={"allow": ", ".join(methods)})
