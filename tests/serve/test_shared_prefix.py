"""Requests that come at once and begin alike: a tenant computes the beginning once, replies are as if sent alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event as Flag
from typing import Any

import pytest

from kvfold.engine.scheduling.jobs import Event, Job
from kvfold.serve.ops.request_trace import RequestTrace
from tests import tiny
from tests.engine.jobs import Fresh
from tests.serve.asking import TENANTS, until
from tests.serve.running import Running, running, tool_model

SYSTEM = "the cat sat on the mat and looked at the other cat that sat there, and so on; "


def ask(server: Running, number: int, key: str = "key-a", cache_key: str | None = None) -> Any:
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}. who sat?"}]
    body = {"prompt_cache_key": cache_key}
    return server.openai_as(key).chat.completions.create(
        model="tiny", max_tokens=12, messages=messages, extra_body=body
    )


def ask_at_once(server: Running, keys: list[str], cache_keys: Sequence[str | None] = ()) -> list[Any]:
    """None is admitted before all wait."""
    scheduler, gate = server.service.scheduler, Flag()

    def hold(_: Event) -> None:
        gate.wait(60)

    scheduler.submit(Job([1, 2, 3], Fresh(scheduler.runner, str(server.service.policy)), hold, max_new_tokens=0))
    with ThreadPoolExecutor(len(keys)) as pool:
        asked = zip(keys, cache_keys or [None] * len(keys), strict=True)
        found = [pool.submit(ask, server, number, *of) for number, of in enumerate(asked)]
        until(lambda: scheduler.num_waiting == len(keys))
        gate.set()
        return [one.result() for one in found]


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x", "int8"])
def test_a_prefix_is_computed_once_by_each_tenant(policy: str) -> None:
    traces: list[RequestTrace] = []
    keys = ["key-a", "key-a", "key-b", "key-a", "key-b"]
    with running(tool_model(), policy, key="key-a", tenants=TENANTS, on_done=traces.append) as server:
        replies = ask_at_once(server, keys)
        until(lambda: len(traces) == len(keys))
        reused, metrics = [trace.num_reused for trace in traces], server.service.metrics.text()
        alone = [ask(server, number, cache_key=f"{number}") for number in range(len(keys))]
        until(lambda: len(traces) == 2 * len(keys))
        assert not any(trace.num_reused for trace in traces[len(keys) :])
    assert list(map(text_of, replies)) == list(map(text_of, alone))
    assert f"kvfold_reused_tokens_total {sum(reused)}" in metrics
    for tenant in ("red", "blue"):
        first, *others = sorted(trace.num_reused for trace in traces[: len(keys)] if trace.tenant == tenant)
        assert first == 0 and min(others) >= len(SYSTEM) - 16
    assert all(reply.usage.prompt_tokens_details.cached_tokens == 0 for reply in replies), "nothing was cached before"


@pytest.mark.parametrize(("cache_keys", "expected"), [(["x", "x"], [False, True]), (["x", "y"], [False, False])])
def test_prompts_too_short_to_be_cached_share_in_flight_within_a_cache_key(
    cache_keys: list[str], expected: list[bool]
) -> None:
    traces: list[RequestTrace] = []
    with running(tiny.ready("llama"), on_done=traces.append, cache_min_tokens=10_000) as server:
        ask_at_once(server, ["any"] * 2, cache_keys)
        until(lambda: len(traces) == 2)
        assert sorted(trace.num_reused > 0 for trace in traces) == expected
