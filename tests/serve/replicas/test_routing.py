"""Which replica a prompt goes to: every turn of a conversation to one, and nobody gets too much."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.serve.replicas.routing import Backend, choices, prefix_of, route_key

MARK: Any = {"cache_control": {"type": "ephemeral"}}
LONG = "the cat sat on the mat " * 100


def key(body: Any, tenant: str = "a") -> bytes:
    return route_key(tenant, json.dumps(body).encode())


def text(content: str, *, is_marked: bool = False) -> Any:
    return {"type": "text", "text": content, **(MARK if is_marked else {})}


def turns(opening: Any, count: int, **more: Any) -> list[Any]:
    """Bodies of a conversation, turn by turn, with a marker on the last text of each if `moves`."""
    moves = more.pop("moves", False)
    found = []
    for turn in range(count):
        messages: list[Any] = [{"role": "user", "content": opening}]
        for i in range(turn):
            messages += [{"role": "assistant", "content": f"reply {i}"}, {"role": "user", "content": f"more {i}"}]
        if moves:
            messages[-1] = {"role": "user", "content": [text(messages[-1]["content"], is_marked=True)]}
        found.append({"model": "m", "messages": messages, **more})
    return found


@pytest.mark.parametrize("opening", ["hi", LONG])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"moves": True},
        MARK,
        {"system": "be kind"},
        {"system": [text("be kind", is_marked=True)], "moves": True},
        {"tools": [{"name": "look", "input_schema": {}, **MARK}]},
    ],
    ids=["plain", "moving marker", "automatic marker", "system", "marked system", "marked tool"],
)
def test_every_turn_of_a_conversation_has_the_key_of_its_first(opening: str, more: dict[str, Any]) -> None:
    assert len({key(body) for body in turns(opening, 4, **more)}) == 1


def test_what_is_not_shared_has_another_key() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    others = [
        {**body, "model": "other"},
        {**body, "prompt_cache_key": "k"},
        {"model": "m", "messages": [{"role": "user", "content": "x" + LONG}]},
        {"model": "m", "prompt": "x", "messages": None},
    ]
    keys = {key(body), key(body, "b"), *(key(other) for other in others)}
    assert len(keys) == 6


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"system": [text("one", is_marked=True), text("two")], "messages": [{"content": "hi"}]}, "one"),
        ({"system": "one", "messages": [{"role": "user", "content": [text("doc", is_marked=True), text("q")]}]}, "doc"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}, "hi"),
        ({"instructions": "s", "input": "hi"}, "hi"),
        ({"input": [{"role": "developer", "content": "s"}, {"role": "user", "content": LONG}]}, LONG[:1024]),
        ({"prompt": ["hi"]}, "hi"),
        ({"messages": [{"role": "system", "content": "alone"}]}, "alone"),
    ],
)
def test_the_prefix_that_counts(body: dict[str, Any], prefix: str) -> None:
    assert prefix_of(body) == prefix


NAMES = st.sampled_from(["messages", "system", "tools", "input", "prompt", "content", "text", "role", "cache_control"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_any_json_has_a_key(body: Any) -> None:
    assert len(key(body)) == 16


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b'"\\ud800"', b'{"model": "\\ud800"}'])
def test_anything_else_has_one_too(raw: bytes) -> None:
    assert len(route_key("a", raw)) == 16


def up(*in_flight: int) -> list[Backend]:
    return [Backend(number, is_up=True, num_in_flight=count) for number, count in enumerate(in_flight)]


def test_keys_are_spread_and_only_those_of_one_that_is_gone_move() -> None:
    three = up(0, 0, 0)
    keys = [key({"model": str(i)}) for i in range(3000)]
    before = [choices(one, three)[0].number for one in keys]
    assert all(900 < before.count(number) < 1100 for number in range(3))
    three[1].is_up = False
    after = [choices(one, three)[0].number for one in keys]
    assert all(a == b for a, b in zip(before, after, strict=True) if a != 1)
    assert all(sum(b == 1 and a == number for a, b in zip(after, before, strict=True)) > 450 for number in (0, 2))
    assert choices(keys[0], []) == []


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.binary(min_size=16, max_size=16))
def test_no_replica_gets_more_than_its_share(in_flight: list[int], name: bytes) -> None:
    backends = up(*in_flight)
    chosen = choices(name, backends)
    assert {backend.number for backend in chosen} == set(range(len(in_flight)))
    assert chosen[0].num_in_flight + 1 <= math.ceil(1.25 * (sum(in_flight) + 1) / len(in_flight))
    free = choices(name, up(*[0] * len(in_flight)))[0]
    if in_flight[free.number] == 0:
        assert chosen[0].number == free.number, "the hash decides while there is room"
