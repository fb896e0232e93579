"""An arena that holds fewer tokens than the model takes: longer requests are refused before they are computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfold.errors import KvfoldWarning, OutOfPages
from kvfold.models.loader import Model
from kvfold.serve.server import open_store, service_of
from kvfold.serve.settings import Settings
from tests import tiny
from tests.serve.asking import get
from tests.serve.running import Running, running


@pytest.mark.parametrize(("policy", "num_superblocks"), [("full", 60), ("int4", 30)])
def test_a_prompt_that_cannot_fit_is_refused_and_a_reply_ends_with_the_arena(policy: str, num_superblocks: int) -> None:
    model = _model(num_superblocks)
    with pytest.warns(KvfoldWarning, match="longer requests are refused"), running(model, policy) as server:
        longest = server.service.max_positions
        assert longest < tiny.ready("llama").spec.max_positions
        body = {"model": "tiny", "prompt": tiny.prompt(longest), "max_tokens": 5}
        status, found = _complete(server, body)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{longest} tokens > {longest - 1} maximum of the KV-cache memory, --memory" in found["error"]["message"]
        body |= {"prompt": tiny.prompt(40), "max_tokens": 900, "ignore_eos": True}
        status, found = _complete(server, body)
        assert (status, found["choices"][0]["finish_reason"]) == (200, "length")
        assert longest - 32 <= 40 + found["usage"]["completion_tokens"] <= longest


def test_policies_that_evict_are_not_bounded() -> None:
    with running(_model(60), policy="prefill(keydiff + 64tok) + decode(keydiff + 64tok)") as server:
        assert server.service.max_positions == tiny.ready("llama").spec.max_positions


def test_a_prompt_that_evicting_does_not_fit_in_is_too_long_for_good() -> None:
    with running(_model(20), policy="h2o + 2x") as server:
        for num_tokens, expected in ((40, 200), (700, 400), (40, 200)):
            status, found = _complete(server, {"model": "tiny", "prompt": tiny.prompt(num_tokens), "max_tokens": 2})
            assert status == expected, found
            if status == 400:
                assert found["error"]["code"] == "context_length_exceeded"
                assert "are needed; nothing else is in it; send a shorter request" in found["error"]["message"]


def test_an_arena_that_holds_nothing_serves_nothing() -> None:
    model = _model(9)
    with (
        pytest.raises(OutOfPages, match="give more --memory"),
        service_of(model, "full", Settings(("tiny",)), open_store(model)),
    ):
        pass


def _model(num_superblocks: int) -> Model:
    return tiny.ready("llama", capacity=num_superblocks * 4096)


def _complete(server: Running, body: dict[str, Any]) -> tuple[int, Any]:
    status, text, _ = get(server, "/v1/completions", json.dumps(body), **{"content-type": "application/json"})
    return status, json.loads(text)
