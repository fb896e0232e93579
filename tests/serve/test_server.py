"""Keys, limits, overload, clients that go away, and what the server says of itself."""

from __future__ import annotations

import json
import socket
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvfold.errors import KvfoldWarning
from kvfold.serve.auth import key_digest
from kvfold.serve.server import open_store
from kvfold.serve.settings import Limits
from tests import tiny
from tests.serve.asking import get, until
from tests.serve.running import Running, running, tool_model
from tests.store.servers import RedisServer

HELLO: Any = [{"role": "user", "content": "the cat sat"}]
ENDLESS: Any = {"model": "tiny", "max_tokens": 900, "messages": HELLO}
TENANTS = {key_digest("key-a"): "a", key_digest("key-b"): "b"}


@pytest.fixture
def server() -> Iterator[Running]:
    """Room for one reply, one that waits, and two requests a tenant."""
    limits = Limits(running=1, waiting=1, per_tenant=2, body_bytes=5000)
    with running(tool_model(), limits=limits, tenants=TENANTS, key="key-a") as found:
        yield found


def test_a_key_is_asked_for_in_both_formats(server: Running) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="unknown"):
        server.anthropic_as("wrong").messages.create(**ENDLESS)
    with pytest.raises(openai.AuthenticationError) as caught:
        server.openai_as("wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert get(server, "/v1/models")[0] == 401
    assert get(server, "/v1/models", **{"x-api-key": "key-b"})[0] == 200
    assert get(server, "/v1/models", authorization="Bearer key-b")[0] == 200
    assert get(server, "/health")[0] == 200


def test_bodies_are_bounded_and_must_be_json(server: Running) -> None:
    key = {"x-api-key": "key-a"}
    status, text, headers = get(server, "/v1/messages", "x" * 6000, **key)
    assert (status, json.loads(text)["error"]["type"]) == (413, "request_too_large")
    assert headers["request-id"] == json.loads(text)["request_id"]
    for body in ("{", "[" * 4000, "[]", "7"):
        status, text, _ = get(server, "/v1/messages", body, **key)
        assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error"), body


def test_overload_is_told_with_a_time_to_come_back(server: Running) -> None:
    with ExitStack() as open_streams:
        first = server.anthropic_as("key-a").messages.create(**ENDLESS, stream=True)
        open_streams.callback(first.close)
        next(iter(first))
        waiting = _waiting(server, "key-b")
        open_streams.callback(waiting.close)
        until(lambda: server.service.scheduler.num_waiting == 1)
        with pytest.raises(anthropic.APIStatusError) as caught:
            server.anthropic_as("key-b").messages.create(**ENDLESS)
        assert caught.value.status_code == 529
        assert caught.value.response.headers["retry-after"] == "1"
        error: Any = caught.value.body
        assert error["error"]["type"] == "overloaded_error"
        with pytest.raises(openai.InternalServerError) as caught_too:
            server.openai_as("key-b").chat.completions.create(model="tiny", messages=HELLO)
        assert caught_too.value.status_code == 503


def _waiting(server: Running, key: str) -> HTTPConnection:
    """A request that is sent and not answered yet."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/messages", json.dumps(ENDLESS), {"x-api-key": key})
    return connection


def test_one_tenant_has_so_many_requests_at_a_time() -> None:
    with running(tool_model(), limits=Limits(per_tenant=1), tenants=TENANTS, key="key-a") as server:
        stream = server.anthropic.messages.create(**ENDLESS, stream=True)
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError) as caught:
            server.anthropic.messages.create(**ENDLESS)
        assert caught.value.response.headers["retry-after"] == "1"
        other = server.anthropic_as("key-b").messages.create(model="tiny", max_tokens=2, messages=HELLO)
        assert other.usage.output_tokens == 2
        stream.close()
        until(lambda: server.service.num_running.total() == 0)
        assert server.anthropic.messages.create(model="tiny", max_tokens=2, messages=HELLO).usage.output_tokens == 2


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_gives_its_memory_back(server: Running, is_streamed: bool) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({**ENDLESS, "stream": is_streamed})
    connection.request("POST", "/v1/messages", body, {"x-api-key": "key-a"})
    until(lambda: server.service.scheduler.num_running == 1)
    if is_streamed:
        connection.getresponse().read(20)
    connection.close()
    until(lambda: server.service.scheduler.num_running == 0)
    until(lambda: server.used_bytes == 0)
    assert server.service.scheduler.num_cancelled == 1, "it did not just come to its end"


def test_one_that_waits_and_goes_away_is_forgotten(server: Running) -> None:
    stream = server.anthropic.messages.create(**ENDLESS, stream=True)
    next(iter(stream))
    waiting = _waiting(server, "key-b")
    until(lambda: server.service.scheduler.num_waiting == 1)
    waiting.close()
    until(lambda: server.service.scheduler.num_cancelled == 1)
    assert server.service.scheduler.num_waiting == 0
    stream.close()


def test_a_request_that_takes_too_long_is_broken_off() -> None:
    with running(tool_model(), limits=Limits(request_s=0.2)) as server:
        with pytest.raises(anthropic.APIStatusError) as caught:
            server.anthropic.messages.create(**ENDLESS)
        assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")
        with pytest.raises(anthropic.APIStatusError, match=r"took longer than 0\.2 s"):
            list(server.anthropic.messages.create(**ENDLESS, stream=True))
        with pytest.raises(openai.APIError, match=r"took longer than 0\.2 s"):
            list(server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=900, stream=True))


def test_many_at_once_get_what_each_gets_alone() -> None:
    with running(tool_model()) as server:

        def ask(number: int) -> Any:
            messages: Any = [{"role": "user", "content": f"{number} cats sat on {number} mats"}]
            return server.anthropic.messages.create(model="tiny", max_tokens=20, messages=messages).content

        alone = [ask(number) for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == alone


def test_health_and_metrics_tell_the_state(server: Running) -> None:
    server.anthropic.messages.create(model="tiny", max_tokens=3, messages=HELLO)
    until(lambda: server.service.scheduler.num_running == 0)  # the reply's end is told before its place is free
    health = json.loads(get(server, "/health", **{"x-api-key": "key-a"})[1])
    assert (health["status"], health["model"], health["policy"], health["running"]) == ("ok", "tiny", "full", 0)
    status, text, headers = get(server, "/metrics", **{"x-api-key": "key-a"})
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    assert 'kvfold_requests_total{path="/v1/messages",status="200"} 1' in lines
    assert "kvfold_output_tokens_total 3" in lines
    assert f"kvfold_arena_bytes {server.service.model.arena.capacity_bytes}" in lines
    buckets = [line for line in lines if line.startswith("kvfold_first_token_seconds_bucket")]
    assert buckets[-1] == 'kvfold_first_token_seconds_bucket{le="+Inf"} 1'
    assert lines.count("# TYPE kvfold_first_token_seconds histogram") == 1


def test_when_nothing_runs_only_prefixes_hold_memory(server: Running) -> None:
    marker: Any = {"type": "ephemeral"}
    texts = ["the cat sat on the mat " * 4, "and looked " * 8]
    for length in (1, 2, 2):  # the second one shares pages with the first
        blocks: Any = [{"type": "text", "text": text, "cache_control": marker} for text in texts[:length]]
        server.anthropic.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": blocks}])
    until(lambda: server.service.scheduler.num_running == 0)
    until(lambda: f"kvfold_arena_prefix_bytes {server.used_bytes}\n" in server.service.metrics.text())
    assert server.used_bytes > 0


def test_failures_inside_are_told_without_details(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.service.renderer, "prompt", broken)
    with pytest.raises(anthropic.InternalServerError) as caught:
        server.anthropic.messages.create(**ENDLESS)
    assert "secret" not in str(caught.value)


def test_without_keys_the_queue_is_for_the_one_tenant() -> None:
    with running(tool_model(), limits=Limits(running=2, waiting=10)) as server:

        def ask(number: int) -> int:
            messages: Any = [{"role": "user", "content": f"{number} cats sat " * 9}]
            return len(server.anthropic.messages.create(model="tiny", max_tokens=20, messages=messages).content)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(8))) == [1] * 8


def test_paths_are_shown_as_routes_and_unknown_ones_lead_to_the_documentation(server: Running) -> None:
    pages = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    documentation = pages["project"]["urls"]["Documentation"].replace("/tree/", "/blob/")
    assert f"see {documentation}/serving.md" in get(server, "/nowhere")[1]
    get(server, "/v1/models/tiny", **{"x-api-key": "key-a"})
    text = get(server, "/metrics", **{"x-api-key": "key-a"})[1]
    assert 'kvfold_requests_total{path="/v1/models/{name}",status="200"} 1' in text.splitlines()
    assert ":path}" not in text


def test_a_redis_server_that_does_not_answer_is_told_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.warns(KvfoldWarning, match=f"Redis at 127.0.0.1:{port} does not answer: its tier is skipped") as told:
        open_store(tiny.ready("llama"), host_bytes=1 << 20, redis=f"redis://me:secret@127.0.0.1:{port}/0").close()
    assert "secret" not in str(told[0].message)


def test_a_cpu_copies_no_prefix_to_its_own_memory_unless_it_is_told_to(tmp_path: Path) -> None:
    model = tiny.ready("llama")
    for options, expected in (
        ({}, False),
        ({"host_bytes": 1 << 20}, True),
        ({"disk": tmp_path, "disk_bytes": 1 << 20}, True),
    ):
        with open_store(model, **options) as store:
            assert store.offload is expected and store.tiered.tiers[0].name == "host", "cache markers are kept there"


def test_a_redis_server_that_answers_is_not_warned_of(redis_server: RedisServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_store(tiny.ready("llama"), host_bytes=1 << 20, redis=redis_server.url).close()
