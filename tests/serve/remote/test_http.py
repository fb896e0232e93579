"""What an engine answers beside a completion becomes an error that says so: a lasting fault is no 503."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvfold.serve.api.errors import ApiError
from kvfold.serve.remote.http import EngineHttp

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\nconnection: close\r\n\r\n"


def _error(answer: bytes, ask: Callable[[EngineHttp], Awaitable[object]]) -> ApiError:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await ask(EngineHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))

    with pytest.raises(ApiError) as caught:
        asyncio.run(run())
    return caught.value


async def _whole(http: EngineHttp) -> object:
    return await http.json("POST", "/v1/completions", {})


async def _stream(http: EngineHttp) -> object:
    return [event async for event in http.events("/v1/completions", {})]


@pytest.mark.parametrize("ask", [_whole, _stream])
@pytest.mark.parametrize("answer", [b"\x00garbage\r\n\r\n", _OK + b"[]", _OK + b"data: [1]\n\n"])
def test_an_answer_that_is_no_completion_is_a_502(
    ask: Callable[[EngineHttp], Awaitable[object]], answer: bytes
) -> None:
    found = _error(answer, ask)
    assert found.status == 502 and "no completion" in str(found)


def test_a_stream_that_breaks_off_is_a_503_and_a_missing_key_is_named() -> None:
    assert _error(_OK + b'data: {"choices": []}\n\n', _stream).status == 503
    assert "--engine-key" in str(_error(b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n", _whole))
