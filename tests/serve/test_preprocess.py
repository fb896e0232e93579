"""Before admission: bodies and prompts are bounded, work waits in fair, bounded lines, and who goes away is dropped."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from threading import Event, current_thread
from typing import Any

import anthropic
import openai
import pytest

from kvfold.serve import app
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.preprocess import SMALL_BYTES, Preprocessor
from kvfold.serve.prompt import PromptRenderer
from kvfold.serve.settings import Limits
from tests.serve.asking import TENANTS, get, until
from tests.serve.running import Running, running, tool_model
from tests.serve.templates import im_tokenizer

HELLO: Any = [{"role": "user", "content": "the cat sat"}]
COUNT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "the cat sat " * 100}]})
JSON = {"content-type": "application/json"}
LARGE = SMALL_BYTES + 1


# Lines


def run(*steps: Callable[[Preprocessor], Any], limits: Limits | None = None) -> None:
    async def all_of_it() -> None:
        preprocessor = Preprocessor(limits or Limits())
        for step in steps:
            await step(preprocessor)
        preprocessor.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def test_tenants_take_turns_and_one_burst_holds_nobody_up() -> None:
    order, gate = list[str](), Event()

    async def burst(preprocessor: Preprocessor) -> None:
        first = [asyncio.create_task(preprocessor.run("a", 1, gate.wait)) for _ in range(2)]
        rest = [
            asyncio.create_task(preprocessor.run(name[0], 1, lambda name=name: order.append(name)))  # type: ignore[misc]
            for name in ("a1", "a2", "a3", "b1")
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*first, *rest)

    run(burst)
    assert order.index("b1") <= 2, order


def test_large_bodies_have_threads_of_their_own() -> None:
    gate = Event()

    async def both(preprocessor: Preprocessor) -> None:
        large = [asyncio.create_task(preprocessor.run("a", LARGE, gate.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        assert await preprocessor.run("a", 1, lambda: "small") == "small"
        gate.set()
        await asyncio.gather(*large)

    run(both)


def test_lines_are_bounded_for_a_tenant_and_for_all() -> None:
    gate = Event()

    async def crowd(preprocessor: Preprocessor) -> None:
        mine = [asyncio.create_task(preprocessor.run("a", 1, gate.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="this tenant has 4 requests being read") as caught:
            await preprocessor.run("a", 1, gate.wait)
        assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
        others = [asyncio.create_task(preprocessor.run("b", 1, gate.wait))]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the queue has 3 requests to read") as caught:
            await preprocessor.run("c", LARGE, gate.wait)
        assert caught.value.status == 529
        gate.set()
        await asyncio.gather(*mine, *others)
        assert await preprocessor.run("a", 1, lambda: 7) == 7

    run(crowd, limits=Limits(per_tenant=4, running=1, waiting=2))


def test_what_nobody_waits_for_is_not_begun_and_its_thread_is_not_lost() -> None:
    gate, begun = Event(), list[int]()

    async def gone(preprocessor: Preprocessor) -> None:
        for _ in range(3):
            busy = [asyncio.create_task(preprocessor.run("a", 1, gate.wait)) for _ in range(2)]
            waiting = [asyncio.create_task(preprocessor.run("b", 1, lambda: begun.append(1))) for _ in range(3)]
            await asyncio.sleep(0.01)
            for task in (*waiting, busy[0]):  # one of them works on, with nobody to hear
                task.cancel()
            await asyncio.gather(*waiting, busy[0], return_exceptions=True)
            last = asyncio.create_task(preprocessor.run("c", 1, lambda: 7))
            await asyncio.sleep(0.01)
            assert not last.done(), "the thread of the cancelled one is still busy"
            gate.set()
            assert await last == 7
            await busy[1]
            gate.clear()

    run(gone)
    assert not begun


def test_quick_work_on_a_short_body_needs_no_thread_but_waits_in_line() -> None:
    gate = Event()

    async def short(preprocessor: Preprocessor) -> None:
        def name(num_bytes: int, *, is_quick: bool = True) -> Coroutine[Any, Any, str]:
            return preprocessor.run("b", num_bytes, lambda: current_thread().name, is_quick=is_quick)

        own = current_thread().name
        assert [await name(1), await name(1024)] == [own, own]
        others = [await name(1025), await name(0), await name(1, is_quick=False)]
        assert all(other.startswith("kvfold-preprocess-small") for other in others)
        busy = [asyncio.create_task(preprocessor.run("a", 1, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        last = asyncio.create_task(name(1))
        await asyncio.sleep(0.01)
        assert not last.done()
        gate.set()
        await asyncio.gather(*busy)
        assert await last != own

    run(short)


# Sizes


def test_prompts_that_can_only_be_too_long_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = PromptRenderer(im_tokenizer(), 1024)
    monkeypatch.setattr(renderer, "_render", None)
    tool = Block("tool", data={"name": "look", "description": "", "parameters": {}})
    with pytest.raises(ApiError, match=r"its 1025 blocks take at least 1025 tokens > 1024 maximum"):
        renderer.prompt(ChatRequest("m", [Block("text", "user", "a", 0)] * 1025, 1))
    with pytest.raises(ApiError, match=r"its 129 blocks take at least 1032 tokens > 1024 maximum"):
        renderer.prompt(ChatRequest("m", [tool] * 129, 1))
    longest = len("<|im_start|>")
    for ask in (
        ChatRequest("m", [Block("text", "user", "a" * 12289, 0)], 1),
        ChatRequest("m", (), 1, raw_text="a" * 12289),
    ):
        with pytest.raises(ApiError, match=rf"its 12289 characters are more than the {1024 * longest} that 1024"):
            renderer.prompt(ask)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(per_tenant=4), tenants=TENANTS, key="key-a") as found:
        yield found


def answer(server: Running, head: str, *body: bytes) -> tuple[int, str]:
    """Of a request whose body need not be what its head says."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        lines = ["POST /v1/messages HTTP/1.1", "host: x", "x-api-key: key-a", "content-type: application/json", head]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        for piece in body:
            connection.sendall(piece)
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read().decode()


def test_a_long_body_is_refused_before_it_comes(server: Running) -> None:
    limit = 32 * 1024 + (64 << 10)
    assert server.service.body_bytes == limit
    status, text = answer(server, "content-length: 30000000")
    assert status == 413
    assert f"the body has 30000000 bytes or more; the limit is {limit}" in text


def test_a_body_of_unknown_length_is_counted_as_it_comes(server: Running) -> None:
    piece = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    assert answer(server, "transfer-encoding: chunked", *[piece] * 4)[0] == 413


def test_an_operator_may_set_another_limit() -> None:
    assert Limits(body_bytes=5).body_bytes_for(1 << 20) == 5


def test_stop_strings_are_few_and_short(server: Running) -> None:
    client: Any = server.anthropic.messages
    asked: Any = {"model": "tiny", "max_tokens": 2, "messages": HELLO}
    with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences: up to 16 .* 17 came"):
        client.create(**asked, stop_sequences=["a"] * 17)
    with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences: .*1024 characters .* one has 1025"):
        client.create(**asked, stop_sequences=["a" * 1025])
    with pytest.raises(openai.BadRequestError, match=r"stop: up to 4 .* 5 came"):
        server.openai.chat.completions.create(**asked, stop=["a"] * 5)
    assert client.create(**asked, stop_sequences=["~" * 1024] * 16).usage.output_tokens == 2


# On the server


def test_large_bodies_are_not_decoded_in_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, decode = list[str](), app._decoded

    def noted(raw: bytearray) -> object:
        threads.append(current_thread().name)
        return decode(raw)

    monkeypatch.setattr(app, "_decoded", noted)
    texts: Any = [{"type": "text", "text": "a" * 10} for _ in range(500)]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": texts}]})
    status, text, _ = get(server, "/v1/messages/count_tokens", body, **JSON, **{"x-api-key": "key-a"})
    assert status == 200, text
    assert json.loads(text)["input_tokens"] > 500 * 10
    assert [name.rpartition("_")[0] for name in threads] == ["kvfold-preprocess-small"]


@contextmanager
def held(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChatRequest]]:
    """Prompts wait until the end; yields those that were begun."""
    gate, begun, prompt = Event(), list[ChatRequest](), server.service.renderer.prompt

    def slow(ask: ChatRequest) -> Any:
        begun.append(ask)
        assert gate.wait(60)
        return prompt(ask)

    monkeypatch.setattr(server.service.renderer, "prompt", slow)
    try:
        yield begun
    finally:
        gate.set()
        monkeypatch.setattr(server.service.renderer, "prompt", prompt)


def asked(server: Running, path: str, key: str = "key-a") -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, COUNT, {"x-api-key": key, **JSON})
    return connection


def test_counting_waits_in_line_like_any_request_and_is_dropped_with_its_client(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor = server.service.preprocessor
    with held(server, monkeypatch) as begun:
        busy = [asked(server, "/v1/messages/count_tokens") for _ in range(2)]
        until(lambda: len(begun) == 2)
        gone = [asked(server, path) for path in ("/v1/messages/count_tokens",) * 2]
        until(lambda: preprocessor._small.num_waiting == 2)
        status, text, headers = get(server, "/v1/messages/count_tokens", COUNT, **JSON, **{"x-api-key": "key-a"})
        assert (status, headers["retry-after"]) == (429, "1"), text
        for connection in gone:
            connection.close()
        until(lambda: preprocessor._small.num_waiting == 0)
        assert get(server, "/health")[0] == 200, "others are served meanwhile"
    for connection in busy:
        assert connection.getresponse().status == 200
    assert len(begun) == 2
