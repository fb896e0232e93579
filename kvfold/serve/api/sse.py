"""Answers as they go over the wire: server-sent events, errors in the client's format, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from kvfold.errors import MissingExtra
from kvfold.serve.api.errors import ApiError

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, StreamingResponse
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error

Json = dict[str, Any]
T = TypeVar("T")
_log = logging.getLogger("kvfold.serve")


class EventStream(StreamingResponse):
    """Server-sent events; closes its reply however it ends, even if nothing of it was ever read."""

    def __init__(self, lines: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_close = [close]

    def then(self, call: Callable[[], None]) -> None:
        """Call it too when it has ended."""
        self._on_close.append(call)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for call in self._on_close:
                call()


class Writer(Protocol):
    """A reply in one format. `failed`: the last event of a stream that is broken off."""

    async def whole(self) -> Json: ...
    def events(self) -> AsyncIterator[Json]: ...
    def failed(self, error: ApiError) -> Json: ...


async def named(writer: Writer, request_id: str) -> AsyncIterator[str]:
    async for event in _until_failed(writer, request_id):
        yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


async def unnamed(writer: Writer, request_id: str) -> AsyncIterator[str]:
    async for event in _until_failed(writer, request_id):
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def _until_failed(writer: Writer, request_id: str) -> AsyncIterator[Json]:
    """Its status is long sent, so a stream tells of an error in its last event, whatever the error is."""
    try:
        async for event in writer.events():
            yield event
    except Exception as error:
        yield writer.failed(as_api_error(error, request_id))


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Clients are told nothing of what went wrong inside; the log has it under the request's id."""
    if isinstance(error, ApiError):
        return error
    _log.error("request failed", exc_info=error, extra={"facts": {"request": request_id}})
    return ApiError(500, "the server failed; its log says why")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns, unless the client disconnects before; the work is then cancelled."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(request: Request, error: ApiError, request_id: str) -> JSONResponse:
    """Anthropic's shape under /v1/messages and for its clients, else OpenAI's."""
    path = request.scope["path"]  # a URL cannot be made of every Host header
    if path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        inside = {"type": error.kind, "message": str(error)}
        return JSONResponse(
            {"type": "error", "error": inside, "request_id": request_id}, error.status, headers=error.headers
        )
    status = 503 if error.status == 529 else error.status
    code = error.code or {401: "invalid_api_key", 404: "not_found"}.get(status)
    shape: Json = {"message": str(error), "type": error.kind, "param": _param(error), "code": code}
    return JSONResponse({"error": shape}, status, headers=error.headers)


def _param(error: ApiError) -> str | None:
    """The field that is to blame: messages begin with its path."""
    field, colon, _ = str(error).partition(": ")
    return field if colon and " " not in field and error.status in (400, 404) else None
