"""Per-request middleware: request id, tenant, errors in the client's format, trace, metrics and log line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import EventStream, as_api_error, error_response
from kvfold.serve.auth import tenant_of
from kvfold.serve.ids import random_id
from kvfold.serve.ops.request_trace import RequestTrace, log_request
from kvfold.serve.service import Service

Handler = Callable[[Request], Awaitable[Response]]
POLL_HEADER = "x-kvfold-poll"  # on the requests by which a proxy asks for the health of its replicas
OnDone = Callable[[RequestTrace], None]


class RequestMiddleware:
    """`on_done` is called in the event loop with the trace of every finished /v1/ request."""

    def __init__(self, service: Service, on_done: OnDone) -> None:
        self._service, self._on_done = service, on_done

    def route(self, path: str, handler: Handler, methods: Sequence[str] = (), name: str = "") -> Route:
        """`methods` empty: all. `name`: the path in logs and metric labels, from a fixed set to bound cardinality."""
        name = name or path

        async def endpoint(request: Request) -> Response:
            parent = request.headers.get("traceparent")
            trace = RequestTrace(f"req_{random_id()}", request.method, name, parent=parent)
            is_health_poll = name == "/health" and POLL_HEADER in request.headers
            trace.is_poll = name.startswith("/dashboard/") or is_health_poll
            request.state.trace, request.state.at = trace, self._service.clock()
            response = await self._answer(handler, methods, request, trace)
            response.headers["request-id"] = response.headers["x-request-id"] = trace.id
            trace.status = response.status_code
            if not is_health_poll:
                self._service.metrics.add("kvfold_requests_total", path=name, status=str(trace.status))
            if isinstance(response, EventStream):
                response.on_close(partial(self._finish, trace))
            else:
                self._finish(trace)
            return response

        route = Route(path, endpoint)
        route.methods = None  # a 405, too, is in the client's format
        return route

    async def _answer(
        self, handler: Handler, methods: Sequence[str], request: Request, trace: RequestTrace
    ) -> Response:
        try:
            if methods and request.method not in methods:
                message = f"{request.scope['path'][:200]} takes {' and '.join(methods)}, not {request.method[:20]}"
                raise ApiError(405, message, headers={"allow": ", ".join(methods)})
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            failure = as_api_error(error, trace.id)
            trace.why = failure.logged
            return error_response(request, failure, trace.id)

    def tenant(self, request: Request, *, is_listed: bool = False) -> str:
        """Tenant of the API key; `is_listed`: the request appears on the tenant's dashboard."""
        trace: RequestTrace = request.state.trace
        settings = self._service.settings
        trace.tenant = tenant_of(request.headers, settings.tenants, settings.proxy_digest)
        if is_listed:
            trace.is_listed = True
            self._service.recent(trace.tenant).add(trace)
        return trace.tenant

    def is_known(self, request: Request) -> bool:
        """Whether the request has a valid API key, or the server needs none."""
        try:
            self.tenant(request)
        except ApiError:
            return False
        return True

    def _finish(self, trace: RequestTrace) -> None:
        trace.finish()
        if trace.tenant is not None and trace.is_listed:
            self._service.recent(trace.tenant).finish(trace)
        if trace.path.startswith("/v1/"):
            self._on_done(trace)
        if not trace.is_poll or trace.status != 200:
            log_request(trace)
