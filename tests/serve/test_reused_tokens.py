"""Usage of a prompt that is sent twice: what it counts as cached is what was not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvfold.serve.ops.request_trace import RequestTrace
from tests import tiny
from tests.serve.running import CHUNK_LEN, Running, running, tool_model

_POLICIES = ("full", "keydiff + 2x")
_traces: list[RequestTrace] = []


@pytest.fixture(scope="module", params=_POLICIES)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(tool_model(), request.param, cache_min_tokens=8, on_done=_traces.append) as found:
        yield found


def _complete(server: Running, tokens: list[int]) -> tuple[int, int, int]:
    """Tokens that usage counts as cached, that were reused, and that usage counts as written."""
    _traces.clear()
    answer: Any = server.openai.completions.create(model="tiny", prompt=tokens, max_tokens=1)
    server.settle()
    (trace,) = _traces
    details = answer.usage.prompt_tokens_details.to_dict()
    return details["cached_tokens"], trace.num_reused, details["cache_write_tokens"]


@pytest.mark.parametrize("length", [8, 15, 16, 17, 32, 33, 48, 64, 70])
def test_usage_of_a_repeated_prompt_is_what_was_reused(server: Running, length: int) -> None:
    tokens = tiny.prompt(length, seed=length)
    is_lossless = server.service.policy.short == "full"
    assert _complete(server, tokens) == (0, 0, length if is_lossless else 0)
    cached, reused, written = _complete(server, tokens)
    assert (cached, written) == (reused, 0)
    if is_lossless:
        assert cached == (length - 1) // CHUNK_LEN * CHUNK_LEN
