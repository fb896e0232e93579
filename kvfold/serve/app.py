"""Routes: what is asked, and in which format. Works on any ASGI server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from kvfold import __version__
from kvfold.errors import MissingExtra
from kvfold.serve.anthropic import read_count, read_messages
from kvfold.serve.anthropic_out import MessageWriter
from kvfold.serve.api_error import ApiError, bad_request
from kvfold.serve.ask import Ask
from kvfold.serve.chat import ChatWriter, read_chat
from kvfold.serve.completions import CompletionWriter, read_completion
from kvfold.serve.dashboard import Dashboard
from kvfold.serve.guard import Guard, Handler, OnDone
from kvfold.serve.metrics import CONTENT_TYPE
from kvfold.serve.openai import OpenAIBody, has_explicit
from kvfold.serve.plan import anthropic_plan
from kvfold.serve.responses import ResponseWriter, read_input_tokens, read_response
from kvfold.serve.service import Service, Start
from kvfold.serve.wire import EventStream, Json, named, unless_gone, unnamed

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error


class Writer(Protocol):
    """A reply in one format."""

    async def whole(self) -> Json: ...
    def events(self) -> AsyncIterator[Json]: ...


class App:
    """Endpoints over one service; `on_done` is told of requests to the API that are over."""

    def __init__(self, service: Service, on_done: OnDone = lambda trail: None) -> None:
        self.service = service
        self._guard = Guard(service, on_done)
        self._created = int(time.time())

    def asgi(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application; `on_start` is called when it begins to take requests."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            on_start()
            yield

        post: dict[str, Handler] = {
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/chat/completions": partial(self._openai, read_chat, ChatWriter),
            "/v1/completions": partial(self._openai, read_completion, CompletionWriter),
            "/v1/responses": partial(self._openai, read_response, ResponseWriter),
            "/v1/responses/input_tokens": self._input_tokens,
        }
        get: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
            **Dashboard(self.service, self._guard).handlers,
        }
        route = self._guard.route
        routes = [route(path, handler, ["POST"]) for path, handler in post.items()]
        routes += [route(path, handler) for path, handler in get.items()]
        rest = route("/{path:path}", _not_found, ["GET", "POST", "PUT", "DELETE"], "other")
        return Starlette(routes=[*routes, rest], lifespan=lifespan)

    async def _body(self, request: Request) -> object:
        """JSON of a bounded size."""
        limit, found = self.service.settings.limits.body_bytes, bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes; shorten the request")
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            raise bad_request("the body is no valid JSON") from None

    async def _answer(
        self, request: Request, start: Start, ask: Ask, make: Callable[..., Writer], body: Any
    ) -> Response:
        """A reply, whole or as a stream; when the client goes away, so does the job."""
        reply = await unless_gone(request, self.service.start(ask, start))
        try:
            writer = make(self.service, body, reply)
            if not body.is_streamed:
                return JSONResponse(await unless_gone(request, writer.whole()))
        except BaseException:
            reply.close()
            raise
        is_named = make is not ChatWriter and make is not CompletionWriter
        lines = named(writer.events()) if is_named else unnamed(writer.events())
        return EventStream(lines, reply.close)

    # Anthropic

    async def _messages(self, request: Request) -> Response:
        tenant = self._guard.tenant(request, is_listed=True)
        body = read_messages(await self._body(request), self.service.settings)
        self._check_markers(body.ask)
        start = Start(tenant, request.state.at, anthropic_plan, trail=request.state.trail)
        return await self._answer(request, start, body.ask, MessageWriter, body)

    def _check_markers(self, ask: Ask) -> None:
        if self.service.no_reuse is not None and has_explicit(ask):
            raise bad_request(f"cache markers cannot be honoured: {self.service.no_reuse}")

    async def _count_tokens(self, request: Request) -> Response:
        self._guard.tenant(request)
        prompt = await self.service.prompt(read_count(await self._body(request)))
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    # OpenAI

    async def _openai(self, read: Callable[..., OpenAIBody], make: Callable[..., Writer], request: Request) -> Response:
        tenant = self._guard.tenant(request, is_listed=True)
        body = read(await self._body(request), self.service.settings)
        self._check_markers(body.ask)
        caching = body.caching
        plan_with = None if caching is None else caching.plan
        scope, trail = "" if caching is None else caching.key, request.state.trail
        start = Start(tenant, request.state.at, plan_with, scope, trail)
        return await self._answer(request, start, body.ask, make, body)

    async def _input_tokens(self, request: Request) -> Response:
        self._guard.tenant(request)
        prompt = await self.service.prompt(read_input_tokens(await self._body(request)))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    # Looking

    async def _models(self, request: Request) -> Response:
        self._guard.tenant(request)
        found = [self._card(name) for name in self.service.settings.names]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": found, **ends})

    async def _model(self, request: Request) -> Response:
        self._guard.tenant(request)
        name = request.path_params["name"]
        self.service.check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> Json:
        """One object with the fields of both formats."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        anthropic = {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        limits = {"max_input_tokens": self.service.model.spec.max_positions}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvfold", **anthropic, **limits}

    async def _health(self, request: Request) -> Response:
        scheduler = self.service.scheduler
        facts = {"model": self.service.settings.names[0], "policy": self.service.policy.short, "version": __version__}
        return JSONResponse(
            {"status": "ok", **facts, "running": scheduler.num_running, "waiting": scheduler.num_waiting}
        )

    async def _metrics(self, request: Request) -> Response:
        store = self.service.store
        more = {} if store is None else {"kvfold_store_events_total": store.counters()}
        return PlainTextResponse(self.service.metrics.text(more), media_type=CONTENT_TYPE)


async def _not_found(request: Request) -> Response:
    raise ApiError(404, f"there is no {request.method} {request.url.path[:200]} here; see docs/serving.md")
