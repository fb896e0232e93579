"""The ASGI application: routes of the Anthropic and OpenAI APIs, /v1/models, /health, /ready and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from kvfold import __version__
from kvfold.errors import DOCS_URL
from kvfold.serve.api.anthropic import check_version, read_count, read_messages
from kvfold.serve.api.anthropic_reply import MessageWriter
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.openai_chat import ChatWriter, CompletionWriter, read_chat, read_completion
from kvfold.serve.api.openai_responses import ResponseWriter, read_input_tokens, read_response
from kvfold.serve.api.openapi import openapi
from kvfold.serve.api.openapi import page as page_of
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.api.sse import EventStream, Writer, sse_lines
from kvfold.serve.api.strict_json import InvalidJson, Json, parse_json
from kvfold.serve.api.validation import Fields
from kvfold.serve.connections import OK_WRITER
from kvfold.serve.disconnect import cancel_on_disconnect
from kvfold.serve.middleware import Handler, OnDone, RequestMiddleware
from kvfold.serve.native import NativeRoutes
from kvfold.serve.ops.dashboard import PAGE_HEADERS, Dashboard
from kvfold.serve.ops.metrics import CONTENT_TYPE
from kvfold.serve.reply import Body, RequestContext
from kvfold.serve.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]
MAX_PAGE = 1000  # Anthropic's
_INLINE_BYTES = 16 << 10  # JSON this short is decoded in the event loop: waking a thread would take longer
T = TypeVar("T")


class App:
    """Endpoints over one service; `on_done` is called with the trace of each finished API request."""

    def __init__(self, service: Service, on_done: OnDone = lambda trace: None) -> None:
        self.service = service
        self._middleware = RequestMiddleware(service, on_done)
        self._created = int(time.time())
        self._document = openapi()

    def asgi(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application; `on_start` is called when it begins to take requests."""

        dashboard = Dashboard(self.service, self._middleware)
        native = NativeRoutes(self.service, self._middleware, self._read)

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            on_start()
            history = asyncio.create_task(dashboard.keep_history())
            yield
            history.cancel()

        post: dict[str, Handler] = {
            "/v1/messages": partial(self._reply, read_messages, MessageWriter),
            "/v1/messages/count_tokens": partial(self._count, read_count, {}),
            "/v1/chat/completions": partial(self._reply, read_chat, ChatWriter),
            "/v1/completions": partial(self._reply, read_completion, CompletionWriter),
            "/v1/responses": partial(self._reply, read_response, ResponseWriter),
            "/v1/responses/input_tokens": partial(self._count, read_input_tokens, {"object": "response.input_tokens"}),
            **native.handlers,
        }
        get: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/api": self._api_page,
            **dashboard.handlers,
        }
        route = self._middleware.route
        routes = [route(path, handler, ["POST"]) for path, handler in post.items()]
        routes += [route(path, handler, ["GET", "HEAD"], _shown_path(path)) for path, handler in get.items()]
        rest = route("/{path:path}", _not_found, name="other")

        async def no_path(request: Request, _: Exception) -> Response:
            """A target such as `*`, which no route has."""
            found: Response = await rest.endpoint(request)
            return found

        direct = {path: route(path, handler, ["POST"]).endpoint for path, handler in post.items() if "{" not in path}
        handlers = {404: no_path}
        return _Routes(direct, routes=[*routes, rest], lifespan=lifespan, exception_handlers=handlers)

    # Replies and token counts

    async def _reply(self, read: Callable[..., Body], make: Callable[..., Writer], request: Request) -> Response:
        """The reply as JSON or as a stream; a client that disconnects cancels the job."""
        service, state = self.service, request.state
        tenant = self._middleware.tenant(request, is_listed=True)
        body = await self._read(request, tenant, partial(read, settings=service.settings))
        if service.no_reuse is not None and body.request.has_markers:
            message = f"prompt caching is not available, leave markers out: {service.no_reuse}"
            raise bad_request(message)
        context = RequestContext(
            tenant, state.at, body.planner, body.cache_key, state.trace, state.num_bytes, body.is_streamed
        )
        reply = await cancel_on_disconnect(request.scope, request.receive, service.start(body.request, context))
        try:
            writer = make(service, body, reply)
            if not body.is_streamed:
                return JSONResponse(await cancel_on_disconnect(request.scope, request.receive, writer.whole()))
        except BaseException:
            reply.close()
            raise
        return EventStream(sse_lines(writer, state.trace), reply.close, reply.write_to)

    async def _count(self, read: Callable[[object], ChatRequest], more: Json, request: Request) -> Response:
        """Prompt tokens."""
        tenant = self._middleware.tenant(request)
        chat_request = await self._read(request, tenant, read)
        context = RequestContext(tenant, request.state.at, num_bytes=request.state.num_bytes)
        prompt = await cancel_on_disconnect(request.scope, request.receive, self.service.prompt(chat_request, context))
        return JSONResponse({**more, "input_tokens": len(prompt.tokens)})

    async def _read(self, request: Request, tenant: str, read: Callable[[object], T]) -> T:
        """`read` applied to the JSON of a size-limited body; a large body is decoded outside the event loop."""
        raw = await self._body(request)
        request.state.num_bytes = len(raw)
        if len(raw) <= _INLINE_BYTES:
            return read(_decoded(raw))
        work = self.service.preprocess(tenant, len(raw), lambda: read(_decoded(raw)))
        return await cancel_on_disconnect(request.scope, request.receive, work)

    async def _body(self, request: Request) -> bytearray:
        """413 before reading if content-length is over the limit, else as soon as the received bytes are."""
        _check_headers(request)
        length, found = request.headers.get("content-length", ""), bytearray()
        self._check_length(int(length) if length.isdecimal() else 0)
        body_s = self.service.settings.limits.body_s
        try:
            async with asyncio.timeout(body_s):
                async for piece in request.stream():
                    found += piece
                    self._check_length(len(found))
        except TimeoutError:  # the connection is closed, too: the rest may never arrive
            message = f"the body did not arrive within {body_s:g} s; send the request again"
            raise ApiError(408, message, headers={"connection": "close"}) from None
        return found

    def _check_length(self, num_bytes: int) -> None:
        limit = self.service.body_bytes
        if num_bytes > limit:
            raise ApiError(413, f"the body has {num_bytes} bytes or more; the limit is {limit}; shorten it")

    # Models, health, metrics

    async def _models(self, request: Request) -> Response:
        self._middleware.tenant(request)
        names, has_more = page(list(dict.fromkeys(self.service.settings.names)), request.query_params)
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None, "has_more": has_more}
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names], **ends})

    async def _model(self, request: Request) -> Response:
        self._middleware.tenant(request)
        name = request.path_params["name"]
        self.service.check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> Json:
        """One model object with the fields of both vendors' formats."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        anthropic = {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        limits = {"max_input_tokens": self.service.max_positions - 1}  # one is left for the reply
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvfold", **anthropic, **limits}

    async def _health(self, request: Request) -> Response:
        """The status is public; load and model need an API key, as /metrics does."""
        scheduler = self.service.scheduler
        state = scheduler.state
        status = "ok" if state in ("running", "closed") else state  # an orderly shutdown is no failure
        found: Json = {"status": status}
        if self._middleware.is_known(request):
            names, policy = self.service.settings.names, self.service.policy
            found |= {"model": names[0], "policy": policy.short, "version": __version__}
            found |= {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
        return JSONResponse(found, 200 if status == "ok" else 503)

    async def _ready(self, request: Request) -> Response:
        """Readiness probe of load balancers."""
        state = self.service.state
        is_ready = state == "running"
        return JSONResponse({"ready": is_ready, "state": state}, 200 if is_ready else 503)

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def _api_page(self, request: Request) -> Response:
        return Response(page_of(self._document), media_type="text/html", headers=PAGE_HEADERS)

    async def _metrics(self, request: Request) -> Response:
        self._middleware.tenant(request)
        store = self.service.store
        more = {} if store is None else {"kvfold_store_events_total": store.counters()}
        return PlainTextResponse(self.service.metrics.text(more), media_type=CONTENT_TYPE)


class _Routes(Starlette):
    """Requests for `direct` paths do without Starlette's routing and its layers around each endpoint: endpoints answer
    their own errors, and the connection those of writing."""

    def __init__(self, direct: Mapping[str, Endpoint], **options: Any) -> None:
        super().__init__(**options)
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            response = await endpoint(Request(scope, receive, send))
            write = scope.get(OK_WRITER)
            if write is not None and type(response) is JSONResponse and response.status_code == 200:
                await write(response.raw_headers, response.body)
            else:
                await response(scope, receive, send)


def _decoded(raw: bytearray) -> object:
    try:
        return parse_json(raw)
    except InvalidJson as error:
        where = error.where or "the body is no valid JSON"
        raise bad_request(f"{where}: {error}", logged=f"{where}: it is no valid JSON") from None


async def _not_found(request: Request) -> Response:
    there = f"{request.method[:20]} {request.scope['path'][:200]}"
    raise ApiError(404, f"there is no {there} here; see {DOCS_URL}/serving.md", logged="there is no such path")


def _shown_path(path: str) -> str:
    """A route without Starlette's types: /v1/models/{name}."""
    return path.replace(":path}", "}")


def _check_headers(request: Request) -> None:
    """As OpenAI does; a missing content-type means JSON."""
    if request.scope["path"].startswith("/v1/messages"):
        check_version(request.headers)
    given = request.headers.get("content-type", "application/json")
    if given.partition(";")[0].strip().lower() != "application/json":
        message = "content-type: bodies are application/json (curl: -H 'content-type: application/json')"
        raise ApiError(400, f'{message}, not "{given[:80]}"', logged=message, code="unsupported_content_type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "content-encoding: bodies are not compressed; leave the header out"
        raise ApiError(400, f'{message}, not "{encoding[:80]}"', logged=message, code="unsupported_content_encoding")


def page(names: Sequence[str], asked: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    """Anthropic's pagination: up to `limit` names, the first ones after an id or the last ones before one, and whether
    there are more in that direction. OpenAI clients send no page parameters and get all."""
    fields = Fields({name: asked[name] for name in ("limit", "after_id", "before_id") if name in asked})
    after, before, limit = fields.optional_text("after_id"), fields.optional_text("before_id"), fields.peek("limit")
    for name, value in (("after_id", after), ("before_id", before)):
        if value is not None and value not in names:
            fields.refuse(name, "the id of a model that is listed is required")
    if after is not None and before is not None:
        fields.refuse("before_id", "after_id is given too; leave one out")
    if limit is not None and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= MAX_PAGE):
        fields.refuse("limit", f"a whole number from 1 to {MAX_PAGE} is required")
    most = MAX_PAGE if limit is None else int(limit[:5])
    if before is not None:
        rest = names[: names.index(before)]
        return rest[-most:], len(rest) > most
    rest = names if after is None else names[names.index(after) + 1 :]
    return rest[:most], len(rest) > most
