"""What requests would cache, told offline, and that a running server does just that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvfold.serve.cache.explain import CacheExplanation, compare, explain
from kvfold.serve.prompt import PromptRenderer
from kvfold.serve.settings import Settings
from tests.serve.running import TOOL_TEMPLATE, Running, diagnostics, running, tool_model, typed
from tests.tiny import tokenizer

MARK: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
LONG = "the cat sat on the mat and looked at the other cat that sat there "


def text(content: str, marker: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": content} | ({"cache_control": marker} if marker else {})


def body(*blocks: dict[str, Any], model: str = "tiny", **more: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": list(blocks)}], **more}


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    found = tokenizer()
    found.chat_template = TOOL_TEMPLATE
    return PromptRenderer(found)


@pytest.fixture
def explained(renderer: PromptRenderer) -> Any:
    return lambda data: explain(data, renderer, Settings(("tiny",), cache_min_tokens=32))


def test_places_are_told_with_what_becomes_of_them(explained: Any) -> None:
    found: CacheExplanation = explained(body(text("a", MARK), text(LONG), text(LONG, MARK), text("x")))
    assert [step.status for step in found.steps] == ["below_minimum", "looked_at", "written", "not_looked_at"]
    assert [step.begins for step in found.steps] == ["a", LONG[:40], LONG[:40], "x"]
    assert found.cold.num_short == found.steps[2].end == found.warm.num_read
    assert found.cold.num_tokens == found.warm.num_tokens == found.num_tokens


def test_points_are_told_marked_or_not(renderer: PromptRenderer) -> None:
    settings = Settings(("tiny",), cache_min_tokens=32, point_tokens=100)
    found = [explain(body(text(LONG), text(LONG, mark), text("x")), renderer, settings) for mark in (None, MARK)]
    assert [[step.is_point for step in one.steps] for one in found] == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("model", "marker", "requests"), [("tiny", MARK, 2), ("tiny", HOUR, 3), ("claude-fable-5-1", HOUR, 3)]
)
def test_break_even_is_where_the_price_falls_below_that_without_caching(
    explained: Any, model: str, marker: Any, requests: int
) -> None:
    found: CacheExplanation = explained(body(text(LONG, marker), model=model))
    assert found.break_even == requests
    assert found.factor(requests - 1) > 1 > found.factor(requests)


def test_without_entries_caching_never_pays(explained: Any) -> None:
    assert explained(body(text(LONG))).break_even is None


BASE = body(text("1 " + LONG, MARK), text("x"), system=[text("2 " + LONG, MARK)])
FAR = body(text("1 " + LONG, MARK), *(text(f"part {i}") for i in range(21)), text("end", MARK))
TOOLS = [{"name": "t", "input_schema": {}}]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, str]] = {
    "again": (BASE, BASE, None, r"all \d+ tokens"),
    "model": (BASE, {**BASE, "model": "tiny-too"}, "model_changed", "the model is tiny-too, it was tiny"),
    "tools": (BASE, {**BASE, "tools": [{"name": "t", "input_schema": {}}]}, "tools_changed", r"boundary 0 \(tools\)"),
    "system": (BASE, {**BASE, "system": [text("3 " + LONG, MARK)]}, "system_changed", r'boundary 0 \(system\).*"3 the'),
    "longer system": (
        BASE,
        {**BASE, "system": [text("3 " + LONG * 9, MARK)]},
        "system_changed",
        r'boundary 0 \(system\) differs from the first request, from token \d of the prompt on: "3 the',
    ),
    "end of system": (
        BASE,
        {**BASE, "system": [text("2 " + LONG + "4", MARK)]},
        "system_changed",
        r"boundary 0 \(system\) differs from the first request, from token \d\d+ of the prompt on",
    ),
    "other blocks": (
        body(text("1 " + LONG * 2, MARK)),
        body(text("1 " + LONG), text(LONG, MARK)),
        "messages_changed",
        r"boundary 0 \(messages\) ",
    ),
    "tool choice": (
        {**BASE, "tools": TOOLS},
        {**BASE, "tools": TOOLS, "tool_choice": {"type": "none"}},
        "messages_changed",
        "tool_choice is none, it was auto",
    ),
    "marked earlier": (
        BASE,
        body(text("1 " + LONG), text("x"), system=BASE["system"]),
        "unavailable",
        r"the last marker of the second request is at \d+: mark more",
    ),
    "messages": (BASE, body(text("4 " + LONG, MARK), system=BASE["system"]), "messages_changed", "boundary 1 "),
    "lookback": (
        body(text("1 " + LONG, MARK)),
        body(text("1 " + LONG), *FAR["messages"][0]["content"][1:]),
        "unavailable",
        "before boundary 3: the lookback of a marker is 20 boundaries",
    ),
    "short": (body(text("a", MARK)), BASE, "system_changed", "the first request caches nothing: its last marker"),
    "unmarked": (
        BASE,
        body(text("1 " + LONG), text("x"), system=[text("2 " + LONG)]),
        "unavailable",
        "no block carries",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_second_request_is_told_why_it_misses(explained: Any, name: str) -> None:
    first, second, reason, why = CASES[name]
    found = compare(explained(first), explained(second))
    assert (found.reason or {}).get("type") == reason
    assert re.search(why, found.why)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model()) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_a_running_server_bills_and_diagnoses_the_same(server: Running, explained: Any, name: str) -> None:
    server.clock.now += 10_000.0
    first, second, _, _ = CASES[name]
    found = compare(explained(first), explained(second))
    create = server.anthropic.messages.create
    before = typed(create, **first, diagnostics={"previous_message_id": None})
    server.settle()
    after = typed(create, **second, diagnostics={"previous_message_id": before.id})
    usage = after.usage
    paid = usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens
    assert paid == (found.paid.num_read, found.paid.num_written, found.paid.num_plain)
    assert diagnostics(after)["cache_miss_reason"] == found.reason
