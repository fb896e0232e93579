"""Bodies as smg and vllm-router send them on: what routers add is taken at its neutral value, and refused otherwise.

router_bodies.jsonl was recorded: requests of clients, sent through each router to a server that wrote them down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.asking import TENANTS
from tests.serve.bodies import call, check_refused
from tests.serve.running import Running, running, tool_model

RECORDED = [json.loads(line) for line in Path(__file__).with_name("router_bodies.jsonl").read_text().splitlines()]
CHAT: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "the cat"}]}
RESPONSE: Any = {"model": "tiny", "max_output_tokens": 2, "input": "the cat"}
COMPLETION: Any = {"model": "tiny", "max_tokens": 2, "prompt": "the cat"}
OTHERWISE: Any = [
    ("/v1/chat/completions", CHAT, "skip_special_tokens", False, "skip_special_tokens: only true is supported"),
    ("/v1/chat/completions", CHAT, "continue_final_message", True, "replies cannot be prefilled here"),
    ("/v1/completions", COMPLETION, "return_hidden_states", True, "hidden states are not sent"),
    ("/v1/responses", RESPONSE, "top_k", 5, "top_k: only -1 is supported, not 5"),
    ("/v1/responses", RESPONSE, "repetition_penalty", 1.1, "repetition_penalty: only 1 is supported, not 1.1"),
    ("/v1/responses", RESPONSE, "min_p", 0.1, "min_p: only 0 is supported, not 0.1"),
    ("/v1/chat/completions", CHAT, "store", True, "this server keeps no replies"),
    ("/v1/chat/completions", CHAT, "kvfold", {"policy": "int4"}, 'kvfold.policy: "full" is served here'),
    ("/v1/responses", RESPONSE, "kvfold", {"policy": "nonsense"}, "kvfold.policy: "),
    ("/v1/completions", COMPLETION, "kvfold", {"size": 1}, "kvfold.size: the field is not supported here"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), tenants=TENANTS, key="key-a") as found:
        yield found


@pytest.mark.parametrize("router", ["smg 1.13.0", "vllm-router 0.1.16"])
def test_what_a_router_sends_is_answered(server: Running, router: str) -> None:
    recorded = [one for one in RECORDED if one["router"] == router]
    assert len(recorded) == 8
    for one in recorded:
        headers = {"authorization": "Bearer key-a", **one["headers"]}  # vllm-router sends none on /v1/messages
        answer = call(server, one["path"], one["body"], **headers)
        assert answer.status == 200, answer.text


def test_smg_passes_the_bearer_key_and_no_other() -> None:
    for one in RECORDED:
        if one["router"].startswith("smg"):
            assert (one["headers"].get("authorization"), one["headers"].get("x-api-key")) == ("Bearer key-a", None)


def test_a_request_without_its_key_is_nobodys(server: Running) -> None:
    """vllm-router drops all headers of /v1/messages."""
    body = next(one["body"] for one in RECORDED if one["router"].startswith("vllm") and one["path"] == "/v1/messages")
    check_refused(call(server, "/v1/messages", body), "/v1/messages", 401)


@pytest.mark.parametrize(("path", "body", "name", "value", "message"), OTHERWISE)
def test_other_values_are_refused_by_name(
    server: Running, path: str, body: Any, name: str, value: Any, message: str
) -> None:
    answer = call(server, path, {**body, name: value}, authorization="Bearer key-a")
    assert message in check_refused(answer, path)


def test_the_policy_that_is_served_may_be_named_however_it_is_written() -> None:
    with running(tool_model(), "keydiff + 4x") as server:
        for text in ("keydiff + 4x", "4x + keydiff", ""):
            assert call(server, "/v1/chat/completions", {**CHAT, "kvfold": {"policy": text}}).status == 200
        assert call(server, "/v1/chat/completions", {**CHAT, "kvfold": {"policy": "keydiff + 8x"}}).status == 400


def test_responses_say_that_nothing_is_stored(server: Running) -> None:
    answer = call(server, "/v1/responses", {**RESPONSE, "store": True}, authorization="Bearer key-a")
    assert answer.json["store"] is False


def test_tenants_of_a_proxy_are_apart() -> None:
    from kvfold.serve.auth import key_digest

    with running(tool_model(), proxy_digest=key_digest("secret-of-the-proxy")) as server:
        proved = {"x-kvfold-secret": "secret-of-the-proxy"}
        assert call(server, "/v1/chat/completions", CHAT, **proved, **{"x-kvfold-tenant": "red"}).status == 200
        check_refused(call(server, "/v1/chat/completions", CHAT, **proved), "/v1/chat/completions", 401)
        check_refused(call(server, "/v1/messages", CHAT), "/v1/messages", 401)
        assert set(server.service.recents) == {"red"}
        assert server.service.settings.per_tenant == 32
