"""What one client can learn of another: nothing by reuse across cache keys, and nothing of the load without a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import InputError, ModelError
from kvfold.models.loader import Model
from kvfold.models.spec import read_spec
from kvfold.serve.server import service_of
from kvfold.serve.settings import Settings
from kvfold.store import HostTier, PrefixStore
from tests.serve.asking import TENANTS, get, send
from tests.serve.running import Running, running, tool_model
from tests.store.entry.test_signing import SECRET, forge
from tests.store.servers import RedisServer

LONG = "the cat sat on the mat and looked at the other cat that sat there " * 3
KEY = {"x-api-key": "key-b"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), tenants=TENANTS, key="key-a") as found:
        yield found


def chat(server: Running, **more: Any) -> tuple[int, int]:
    """Tokens that usage calls cached, and tokens that were not computed."""
    before = reused(server)
    asked: Any = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": LONG}], **more}
    usage: Any = server.openai.chat.completions.create(**asked).usage
    server.settle()
    return usage.prompt_tokens_details.cached_tokens, reused(server) - before


def reused(server: Running) -> int:
    lines = server.service.metrics.text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("kvfold_reused_tokens_total "))


def test_nothing_is_reused_across_cache_keys(server: Running) -> None:
    """Neither counted nor in fact: the time to the first token tells nothing of what another key sent."""
    keys: list[dict[str, Any]] = [{}, {"prompt_cache_key": "one"}, {"prompt_cache_key": "two"}]
    assert [chat(server, **key) for key in keys] == [(0, 0)] * 3
    for key in keys:
        cached, computed_not = chat(server, **key)
        assert 0 < cached <= computed_not
    assert len(server.service._prompt_caches) <= 3, "keys leave nothing behind in the process"


def test_no_client_hides_its_requests_from_the_counters(server: Running) -> None:
    """Polls of the proxy are not counted, and nothing else that has their header."""
    counted = 'kvfold_requests_total{path="/v1/models",status="200"}'

    def count() -> int:
        lines = server.service.metrics.text().splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith(counted))

    before = count()
    assert get(server, "/v1/models", **KEY, **{"x-kvfold-poll": "1"})[0] == 200
    assert count() == before + 1


def test_load_and_counters_need_a_key(server: Running) -> None:
    assert get(server, "/metrics")[0] == 401
    assert get(server, "/metrics", **{"x-api-key": "wrong"})[0] == 401
    status, text, _ = get(server, "/metrics", authorization="Bearer key-b")
    assert status == 200 and "kvfold_requests_total" in text
    for headers in ({}, {"x-api-key": "wrong"}):
        status, text, _ = get(server, "/health", **headers)
        assert (status, json.loads(text)) == (200, {"status": "ok"})
    found = json.loads(get(server, "/health", **KEY)[1])
    assert (found["status"], found["model"], "running" in found) == ("ok", "tiny", True)
    assert get(server, "/dashboard/state", **KEY)[0] == 200 and get(server, "/")[0] == 200


def test_a_failure_is_told_without_a_key(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.scheduler._supervisor, "_state", "failed")
    status, text, _ = get(server, "/health")
    assert (status, json.loads(text)) == (503, {"status": "failed"})
    assert get(server, "/ready")[0] == 503


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_what_is_forged_is_not_served_where_there_is_a_secret(redis_server: RedisServer, secret: bytes) -> None:
    texts, counts = [], []
    for _ in range(2):
        with running(tool_model(), redis=redis_server.url, secret=secret) as server:
            reply = send(server, max_tokens=12)
            texts.append(reply.content[0].text)
            counts.append(reply.usage.cache_read_input_tokens)
            server.settle()
            assert forge(redis_server) > 1
            events = {} if server.service.store is None else server.service.store.counters()
    assert (texts[0] == texts[1], counts[0], bool(counts[1])) == (bool(secret), 0, not secret)
    assert any(name.startswith("quarantined.redis") for name in events) == bool(secret)


def test_a_lossy_encoding_is_refused(model: Model) -> None:
    """What was computed would be served at first, and what was lost in it after a restart."""
    store = PrefixStore([HostTier(1 << 20)], form="cachegen")
    refused = pytest.raises(InputError, match="cachegen is lossy: replies after a cache hit would differ")
    with refused, service_of(model, "full", Settings(("tiny",)), store):
        pass


def test_a_refusal_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tool_model()
    monkeypatch.setattr(model.hf.config, "_name_or_path", str(tmp_path))
    model = replace(model, spec=read_spec(model.hf))

    def refuse(policy: Any, spec: Any) -> None:
        raise ModelError(f"{spec.name} cannot be cached")

    monkeypatch.setattr("kvfold.store.store.check_reuse", refuse)
    with running(model) as server:
        assert server.service.no_reuse == f"{tmp_path.name} cannot be cached"
