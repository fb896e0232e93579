"""The state that the dashboard shows: numbers of real requests, for the tenant of the key alone, without any text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvfold.serve.cache.usage import Price
from kvfold.serve.ops.dashboard import FILES
from tests.serve.asking import TENANTS, get, send, until
from tests.serve.running import Running, running, tool_model

NUM_LAYERS, NUM_HEADS = 3, 2  # of the tiny Llama


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One miss, one hit, one request refused, all of one tenant; another tenant's request."""
    with running(tool_model(), "keydiff + 4x", tenants=TENANTS, key="key-a", price=Price(3.0, 15.0)) as found:
        send(found)
        found.settle()
        send(found)
        with pytest.raises(anthropic.NotFoundError):
            send(found, model="other")
        send(found, "key-b", max_tokens=2)
        until(lambda: found.service.scheduler.num_running == 0)
        yield found


def _state(server: Running, key: str) -> Any:
    status, text, headers = get(server, "/dashboard/state", **{"x-api-key": key})
    assert status == 200
    assert headers["cache-control"] == "no-store"
    return json.loads(text)


def test_the_page_is_whole_and_lets_nothing_else_in(server: Running) -> None:
    for path in FILES:
        status, text, headers = get(server, path)
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs no other server"
        assert "https://" not in text
    assert get(server, "/")[2]["content-type"].startswith("text/html")


def test_the_state_adds_up(server: Running) -> None:
    found = _state(server, "key-a")
    assert (found["model"], found["policy"]) == ("tiny", server.service.policy.short)
    assert (found["running"], found["waiting"], found["done"], found["refused"]) == (0, 0, 2, 1)
    assert found["lookups"] == {"absent": 1, "hit": 1}
    refused, hit, miss = found["requests"]
    assert (refused["status"], refused["kept"], "tokens_in" in refused) == (404, None, False)
    assert refused["why"].startswith(
        'model: "other" is not served here; served: tiny, tiny-too; start kvfold serve with'
    )
    assert 0 < miss["kept"] < 0.5, "it was compressed"
    assert (hit["status"], hit["tenant"], hit["lookup"], hit["now"]) == (200, "red", "hit", "done")
    assert (miss["lookup"], miss["miss"], miss["tokens_reused"]) == ("absent", "absent", 0)
    assert 0 < hit["tokens_reused"] < hit["tokens_in"] == miss["tokens_in"]
    assert found["tokens"] == {"input": 2 * hit["tokens_in"], "reused": hit["tokens_reused"], "output": 10}
    assert found["first_token_ms"]["num_samples"] == found["token_ms"]["num_samples"] == 2
    assert found["first_token_ms"]["p50"] <= found["first_token_ms"]["p99"]
    read, written = hit["tokens_reused"], hit["tokens_reused"]
    assert found["usd"]["saved"] == pytest.approx((0.9 * read - 0.25 * written) * 3 / 1e6)


def test_the_history_is_the_tenants_own(server: Running) -> None:
    history = _state(server, "key-a")["history"]
    assert history[0][3:] == [0, 0, 0]
    assert history[-1][3:] == [10, 1, 2], "tokens, hits and lookups"
    assert [sample[0] for sample in history] == sorted(sample[0] for sample in history)
    assert _state(server, "key-b")["history"][-1][3:] == [2, 0, 1]


def test_tiers_tell_what_they_hold(server: Running) -> None:
    tiers = {tier["name"]: tier for tier in _state(server, "key-a")["tiers"]}
    assert list(tiers) == ["device", "host"]
    assert tiers["device"]["hits"] == 1
    assert tiers["device"]["bytes"] > 0


def test_a_tenant_sees_its_own_requests_alone(server: Running) -> None:
    red, blue = _state(server, "key-a"), _state(server, "key-b")
    assert {request["tenant"] for request in blue["requests"]} == {"blue"}
    assert (blue["done"], blue["tokens"]["output"]) == (1, 2)
    path = f"/dashboard/kept/{red['requests'][1]['request']}"
    assert get(server, path, **{"x-api-key": "key-a"})[0] == 200
    assert get(server, path, **{"x-api-key": "key-b"})[0] == 404
    assert get(server, path)[0] == get(server, "/dashboard/state")[0] == 401


def test_the_map_has_every_layer_and_head(server: Running) -> None:
    for request in _state(server, "key-a")["requests"][1:]:
        found = json.loads(get(server, f"/dashboard/kept/{request['request']}", **{"x-api-key": "key-a"})[1])
        assert found["num_tokens"] == request["tokens_in"]
        assert [len(heads) for heads in found["slots"]] == [NUM_HEADS] * NUM_LAYERS
        assert max(map(max, found["slots"])) < found["num_tokens"] / 2, "it was compressed"


def test_nothing_of_the_text_is_told(server: Running) -> None:
    assert "cat" not in get(server, "/dashboard/state", **{"x-api-key": "key-a"})[1]
    metrics = get(server, "/metrics", **{"x-api-key": "key-a"})[1]
    assert "cat" not in metrics.replace("cache", "").replace("allocated", "")


def test_a_reply_on_its_way_is_listed() -> None:
    with running(tool_model()) as server:
        stream = server.anthropic.messages.create(
            model="tiny", max_tokens=900, messages=[{"role": "user", "content": "go"}], stream=True
        )
        next(iter(stream))
        found = json.loads(get(server, "/dashboard/state")[1])
        (row,) = found["requests"]
        assert (row["now"], row["status"], row["lookup"]) == ("decode", 200, "unmarked")
        assert (found["running"], found["done"], found["usd"]) == (1, 0, None)
        stream.close()
        until(lambda: json.loads(get(server, "/dashboard/state")[1])["done"] == 1)
        last = json.loads(get(server, "/dashboard/state")[1])["requests"][0]
        assert (last["now"], last["end"], last["tenant"]) == ("done", "cancelled", "default")


def test_requests_that_were_cancelled_are_a_counter() -> None:
    with running(tool_model()) as server:
        stream = server.anthropic.messages.create(
            model="tiny", max_tokens=900, messages=[{"role": "user", "content": "go"}], stream=True
        )
        next(iter(stream))
        stream.close()
        until(lambda: server.service.scheduler.num_cancelled == 1)
        lines = get(server, "/metrics")[1].splitlines()
        assert {"# TYPE kvfold_requests_cancelled_total counter", "kvfold_requests_cancelled_total 1"} <= set(lines)


def test_preemptions_are_counted_under_both_names(server: Running) -> None:
    lines = get(server, "/metrics", **{"x-api-key": "key-a"})[1].splitlines()
    assert {"# TYPE kvfold_preemptions_total counter", "kvfold_preemptions_total 0"} <= set(lines)
    assert {"# TYPE kvfold_replies_demoted gauge", "kvfold_replies_demoted 0"} <= set(lines)


def test_replies_fill_the_histograms(server: Running) -> None:
    lines = get(server, "/metrics", **{"x-api-key": "key-a"})[1].splitlines()
    assert 'kvfold_token_seconds_bucket{le="+Inf"} 3' in lines
    assert "kvfold_first_token_seconds_count 3" in lines
    assert lines.count("# TYPE kvfold_token_seconds histogram") == 1
