"""HTTP requests to an engine, each over a connection of its own: closing it cancels the request there."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import h11

from kvfold.errors import InputError
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.strict_json import Json

_CONNECT_S = 10.0
_PIECE_BYTES = 64 << 10
_SHOWN_CHARS = 300  # of an engine's own words


class EngineHttp:
    """`key`: sent as a bearer token."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f'--engine "{url}" is no address of a server; write for example http://127.0.0.1:8000')
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = [("host", parts.netloc.rpartition("@")[2]), ("connection", "close")]
        if key is not None:
            self._headers.append(("authorization", f"Bearer {key}"))

    async def json(self, method: str, path: str, body: Json | None = None) -> Json:
        """A whole answer; ApiError 502 or 503 if there is none."""
        async with aclosing(self._pieces(method, path, body)) as pieces:
            return _object(b"".join([piece async for piece in pieces]))

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json]:
        """Server-sent events of a POST; ApiError 502 or 503 if they break off."""
        left, is_whole, has_events = b"", False, False
        async with aclosing(self._pieces("POST", path, body)) as pieces:
            async for piece in pieces:
                *lines, left = (left + piece).split(b"\n")
                for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
                    has_events = True
                    if data == b"[DONE]":
                        is_whole = True
                    else:
                        yield _checked(_object(data))
        if not is_whole:
            raise _down("it broke a reply off") if has_events else _nonsense()

    async def _pieces(self, method: str, path: str, body: Json | None) -> AsyncGenerator[bytes]:
        """The body of an answer with status 200."""
        connection, writer = h11.Connection(h11.CLIENT), None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            writer.write(self._request(connection, method, path, body))
            head = await _next(connection, reader)
            while not isinstance(head, h11.Response):
                head = await _next(connection, reader)
            refused = b""
            while not isinstance(event := await _next(connection, reader), h11.EndOfMessage):
                if isinstance(event, h11.Data) and head.status_code == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refused = (refused + bytes(event.data))[:_PIECE_BYTES]
            if head.status_code != 200:
                raise _refused(head.status_code, refused)
        except h11.ProtocolError as error:
            raise _nonsense() from error
        except (OSError, TimeoutError, EOFError) as error:
            raise _down(f"{type(error).__name__} {error}") from error
        finally:
            if writer is not None:
                writer.transport.abort()

    def _request(self, connection: h11.Connection, method: str, path: str, body: Json | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        headers = [*self._headers, ("content-type", "application/json"), ("content-length", str(len(data)))]
        events = [h11.Request(method=method, target=self._path + path, headers=headers), h11.Data(data=data)]
        return b"".join(connection.send(event) or b"" for event in (*events, h11.EndOfMessage()))


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    data = None
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(data := await reader.read(_PIECE_BYTES))
    except h11.RemoteProtocolError as error:
        if data != b"":
            raise
        raise EOFError("the connection was closed within an answer") from error
    if isinstance(event, h11.ConnectionClosed):
        raise EOFError("the connection was closed")
    return event


def _object(data: bytes) -> Json:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _nonsense()
    return found


def _checked(event: Json) -> Json:
    """An error in a stream is an event."""
    if "error" in event:
        raise _refused(500, json.dumps(event).encode())
    return event


def _down(reason: str) -> ApiError:
    message = "the engine behind this server does not answer; send the request again"
    return ApiError(503, message, logged=f"the engine does not answer ({reason})", retry_after_s=1)


def _nonsense() -> ApiError:
    return ApiError(502, "the engine behind this server answered something that is no completion; is it vLLM?")


def _refused(status: int, body: bytes) -> ApiError:
    """Busy engines are a 503, others a 502 with their own words, which are not logged: they may quote the prompt."""
    if status in (429, 503):
        return ApiError(503, "the engine behind this server is busy; send the request again", retry_after_s=1)
    key = "; its key goes into --engine-key" if status in (401, 403) else ""
    words = f"the engine behind this server refused the request (status {status}{key})"
    return ApiError(502, f"{words}: {_words(body)}", logged=words)


def _words(body: bytes) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return text[:_SHOWN_CHARS]
