"""Server-sent events (SSE) of streamed replies, and error responses in the client's format."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.strict_json import Json
from kvfold.serve.disconnect import cancel_on_disconnect
from kvfold.serve.event_queue import ChunkStream
from kvfold.serve.ops.request_trace import RequestTrace

_log = logging.getLogger("kvfold.serve")
_PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


CHUNKS = "kvfold.chunks"  # in the scope: writes a chunked body straight to the connection


class Body(ChunkStream, Protocol):
    """The head of the response, events that are sent one after the other, and the end behind them, are one write."""

    def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> None: ...
    async def send(self, data: bytes) -> None: ...
    def end(self) -> None: ...


class EventStream(StreamingResponse):
    """An SSE response; calls its callbacks however it ends, even if nothing of it was read. `attach` is called with
    the body, where its lines may be written beside those that are read here."""

    def __init__(
        self,
        lines: AsyncIterator[str],
        close: Callable[[], None],
        attach: Callable[[ChunkStream], None] = lambda stream: None,
    ) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._callbacks, self._attach = [close], attach
        self._body: Body | None = None

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def stream_response(self, send: Any) -> None:
        """A token's way through the layers of ASGI would take longer than the write itself: where the connection offers
        to, it writes events at once."""
        write: Callable[[bytes], Awaitable[None]] = partial(_send_body, send)
        if self._body is not None:
            write = self._body.send
            self._body.begin(self.raw_headers)
            self._attach(self._body)
        else:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self.body_iterator:
            await write(str(line).encode())
        if self._body is not None:
            self._body.end()
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._body = scope.get(CHUNKS)
        try:
            with suppress(ClientDisconnect):
                await cancel_on_disconnect(scope, receive, self.stream_response(send))
        finally:
            for callback in self._callbacks:
                callback()


async def _send_body(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class Writer(Protocol):
    """A reply in one API's format. `events`: of a stream, or their lines where these are known. `failed`: the last
    event of a stream that fails."""

    async def whole(self) -> Json: ...
    def events(self) -> AsyncIterator[Json | str]: ...
    def failed(self, error: ApiError) -> Json: ...


async def sse_lines(writer: Writer, trace: RequestTrace) -> AsyncIterator[str]:
    """Events that have a type are named by it; a stream of others ends with [DONE], as OpenAI's first API does. The
    status line is sent already, so a stream reports an error in its last event."""
    event: Json | str = {}
    try:
        async for event in writer.events():
            yield event if isinstance(event, str) else lines_of(event)
    except Exception as error:
        failure = as_api_error(error, trace.id)
        trace.why = failure.logged
        event = writer.failed(failure)
        yield lines_of(event)
    if "type" not in event:
        yield "data: [DONE]\n\n"


_encode = json.JSONEncoder(ensure_ascii=False).encode
_MARK = "\0text\0"  # in no other field of an event


def lines_of(event: Json) -> str:
    data = f"data: {_encode(event)}\n\n"
    return f"event: {event['type']}\n{data}" if "type" in event else data


class TextLines:
    """Lines of events that differ in one text; all else is encoded once."""

    def __init__(self, event_of: Callable[[str], Json]) -> None:
        self._head, self._tail = lines_of(event_of(_MARK)).split(_encode(_MARK))

    def __call__(self, text: str) -> str:
        return f"{self._head}{encode_basestring(text)}{self._tail}"


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Internal errors become a 500 without details; the log has the traceback under the request's id."""
    if isinstance(error, ApiError):
        return error
    _log.error("request failed", exc_info=error, extra={"facts": {"request": request_id}})
    return ApiError(500, "the server failed; its log says why")


def error_response(request: Request, error: ApiError, request_id: str) -> JSONResponse:
    """Anthropic's shape under /v1/messages and for its clients, else OpenAI's."""
    path = request.scope["path"]  # request.url fails for some Host headers
    if path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        shape: Json = {"type": "error", "error": {"type": error.kind, "message": str(error)}, "request_id": request_id}
        return JSONResponse(shape, error.status, headers=error.headers)
    status = error.openai_status
    code = error.code or {401: "invalid_api_key", 404: "not_found"}.get(status)
    field, colon, _ = str(error).partition(": ")  # the path of an invalid field begins the message
    param = field if colon and " " not in field and error.status in (400, 404) else None
    if code == "context_length_exceeded":
        param = _PROMPT_FIELDS.get(path.removesuffix("/input_tokens"))
    shape = {"error": {"message": str(error), "type": error.kind, "param": param, "code": code}}
    return JSONResponse(shape, status, headers=error.headers)
