"""Server-sent events (SSE) of streamed replies, error responses in the client's format, and client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.strict_json import Json
from kvfold.serve.ops.request_trace import RequestTrace

T = TypeVar("T")
_log = logging.getLogger("kvfold.serve")
_PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


class EventStream(StreamingResponse):
    """An SSE response; calls its callbacks however it ends, even if nothing of it was read."""

    def __init__(self, lines: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._callbacks = [close]

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for callback in self._callbacks:
                callback()


class Writer(Protocol):
    """A reply in one API's format. `failed`: the last event of a stream that fails."""

    async def whole(self) -> Json: ...
    def events(self) -> AsyncIterator[Json]: ...
    def failed(self, error: ApiError) -> Json: ...


async def sse_lines(writer: Writer, trace: RequestTrace) -> AsyncIterator[str]:
    """Events that have a type are named by it; a stream of others ends with [DONE], as OpenAI's first API does."""
    is_named = False
    async for event in _until_failed(writer, trace):
        is_named = "type" in event
        name = f"event: {event['type']}\n" if is_named else ""
        yield f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
    if not is_named:
        yield "data: [DONE]\n\n"


async def _until_failed(writer: Writer, trace: RequestTrace) -> AsyncIterator[Json]:
    """The status line is sent already, so a stream reports an error in its last event."""
    try:
        async for event in writer.events():
            yield event
    except Exception as error:
        failure = as_api_error(error, trace.id)
        trace.why = failure.logged
        yield writer.failed(failure)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Internal errors become a 500 without details; the log has the traceback under the request's id."""
    if isinstance(error, ApiError):
        return error
    _log.error("request failed", exc_info=error, extra={"facts": {"request": request_id}})
    return ApiError(500, "the server failed; its log says why")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of the work; cancels it and raises ClientDisconnect if the client disconnects first."""
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(request: Request, error: ApiError, request_id: str) -> JSONResponse:
    """Anthropic's shape under /v1/messages and for its clients, else OpenAI's."""
    path = request.scope["path"]  # request.url fails for some Host headers
    if path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        shape: Json = {"type": "error", "error": {"type": error.kind, "message": str(error)}, "request_id": request_id}
        return JSONResponse(shape, error.status, headers=error.headers)
    status = 503 if error.status == 529 else error.status
    code = error.code or {401: "invalid_api_key", 404: "not_found"}.get(status)
    field, colon, _ = str(error).partition(": ")  # the path of an invalid field begins the message
    param = field if colon and " " not in field and error.status in (400, 404) else None
    if code == "context_length_exceeded":
        param = _PROMPT_FIELDS.get(path.removesuffix("/input_tokens"))
    shape = {"error": {"message": str(error), "type": error.kind, "param": param, "code": code}}
    return JSONResponse(shape, status, headers=error.headers)
