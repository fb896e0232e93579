"""The prompt cache of a running server, line by line of the contract, with a clock that the tests set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvfold.serve.auth import key_digest
from kvfold.serve.cache.usage import Price
from tests.serve.running import Running, diagnostics, running, tool_model, typed

MARK: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
TENANTS = {key_digest("key-a"): "a", key_digest("key-b"): "b"}
LONG = "the cat sat on the mat and looked at the other cat that sat there "


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), key="key-a", tenants=TENANTS, price=Price(5.0, 25.0)) as found:
        yield found


def text(content: str, marker: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": content} | ({"cache_control": marker} if marker else {})


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def create(server: Running, *messages: dict[str, Any], client: Any = None, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 4, "messages": list(messages), **options}
    found = typed((client or server.anthropic).messages.create, **options)
    server.settle()
    return found


def counts(found: Any) -> tuple[int, int, int]:
    """Read, written, plain."""
    usage = found.usage
    return usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens


def test_a_second_request_reads_what_the_first_wrote(server: Running) -> None:
    first = create(server, user(text("1 " + LONG, MARK), text("who?")))
    second = create(server, user(text("1 " + LONG, MARK), text("where?")))
    read, written, plain = counts(first)
    assert (read, written > 32, plain > 0) == (0, True, True)
    assert counts(second)[:2] == (written, 0)
    assert first.usage.cache_creation.ephemeral_5m_input_tokens == written
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == 0


def test_output_is_that_without_caching(server: Running) -> None:
    asked = text("2 " + LONG), text("who?")
    plain = create(server, user(*asked), max_tokens=24)
    marked = user(text("2 " + LONG, MARK), asked[1])
    cold, warm = (create(server, marked, max_tokens=24) for _ in range(2))
    assert counts(warm)[0] > 0
    assert plain.content[0].text == cold.content[0].text == warm.content[0].text
    assert sum(counts(plain)) == sum(counts(cold)) == sum(counts(warm))


def test_nothing_is_cached_without_a_marker(server: Running) -> None:
    for _ in range(2):
        assert counts(create(server, user(text("3 " + LONG))))[:2] == (0, 0)


def test_a_prefix_below_the_least_length_is_silently_not_cached(server: Running) -> None:
    for _ in range(2):
        assert counts(create(server, user(text("short", MARK), text("x"))))[:2] == (0, 0)


def test_the_automatic_marker_follows_a_conversation(server: Running) -> None:
    turns = [user(text("4 " + LONG))]
    first = create(server, *turns, cache_control=MARK)
    turns += [{"role": "assistant", "content": first.content[0].text}, user(text("and then?"))]
    second = create(server, *turns, cache_control=MARK)
    assert counts(second)[0] == counts(first)[1] > 0
    assert counts(second)[1] > 0
    turns += [{"role": "assistant", "content": "so"}, user(text("and?"))]
    assert counts(create(server, *turns, cache_control=MARK))[0] == sum(counts(second)[:2])


def test_an_entry_lives_five_minutes_from_the_start_of_its_last_use(server: Running) -> None:
    asked = user(text("5 " + LONG, MARK), text("x"))
    written = counts(create(server, asked))[1]
    for seconds in (299.0, 299.0):  # each read makes it live longer
        server.clock.now += seconds
        assert counts(create(server, asked))[0] == written
    server.clock.now += 300.0
    assert counts(create(server, asked))[:2] == (0, written)


def test_the_life_of_an_entry_begins_with_the_request_that_writes_it(server: Running) -> None:
    asked = user(text("22 " + LONG, MARK), text("x"))
    stream = create(server, asked, stream=True)
    next(iter(stream))
    server.clock.now += 240.0  # a slow reply
    list(stream)
    server.clock.now += 60.0
    assert counts(create(server, asked))[0] == 0


def test_an_entry_may_live_an_hour(server: Running) -> None:
    asked = user(text("6 " + LONG, HOUR), text("x"))
    first = create(server, asked)
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == counts(first)[1] > 0
    server.clock.now += 3599.0
    assert counts(create(server, asked))[0] == counts(first)[1]
    server.clock.now += 3600.0
    assert counts(create(server, asked))[0] == 0


def test_times_of_both_lengths_are_billed_apart(server: Running) -> None:
    found = create(server, user(text("7 " + LONG, HOUR), text(LONG, MARK), text("x")))
    usage = found.usage.cache_creation
    assert usage.ephemeral_1h_input_tokens > 0
    assert usage.ephemeral_5m_input_tokens > 0
    assert usage.ephemeral_1h_input_tokens + usage.ephemeral_5m_input_tokens == counts(found)[1]
    server.clock.now += 1000.0  # the shorter one is gone
    later = create(server, user(text("7 " + LONG, HOUR), text(LONG, MARK), text("x")))
    assert counts(later)[0] == usage.ephemeral_1h_input_tokens
    assert later.usage.cache_creation.ephemeral_5m_input_tokens == usage.ephemeral_5m_input_tokens


def test_an_entry_lies_at_its_marker_and_nowhere_before(server: Running) -> None:
    create(server, user(text("8 " + LONG), text(LONG, MARK), text("x")))
    assert counts(create(server, user(text("8 " + LONG, MARK), text("other"))))[0] == 0


def test_markers_are_no_part_of_what_is_matched(server: Running) -> None:
    first = create(server, user(text("9 " + LONG, MARK), text("x")))
    moved = create(server, user(text("9 " + LONG), text("x"), text("y", MARK)))
    assert counts(moved)[0] == counts(first)[1]


@pytest.mark.parametrize(("entry", "markers", "hits"), [(2, [7], True), (2, [22], False), (2, [2, 22], True)])
def test_twenty_places_are_looked_back(server: Running, entry: int, markers: list[int], hits: bool) -> None:
    """As the contract's example, 13 places earlier, for a window of 1,024 tokens."""
    name = f"{entry}{markers} "
    texts = [name + LONG, *(f"part {i}" for i in range(1, 25))]
    create(server, user(*(text(texts[i], MARK if i == entry else None) for i in range(entry + 1))))
    asked = user(*(text(texts[i], MARK if i in markers else None) for i in range(markers[-1] + 1)))
    assert (counts(create(server, asked))[0] > 0) is hits


def test_other_tenants_and_models_do_not_share(server: Running) -> None:
    asked = user(text("10 " + LONG, MARK), text("x"))
    written = counts(create(server, asked))[1]
    other = server.anthropic_as("key-b")
    assert counts(create(server, asked, client=other))[:2] == (0, written)
    assert counts(create(server, asked, model="tiny-too"))[:2] == (0, written)
    assert counts(create(server, asked))[0] == written


def tool(name: str, marker: Any = None) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, "description": LONG, "input_schema": {"type": "object"}}
    return described | ({"cache_control": marker} if marker else {})


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, 3),
        ({"messages": [user(text("other " + LONG, MARK), text("x"))]}, 2),
        ({"tool_choice": {"type": "none"}}, 2),
        ({"system": [text("other " + LONG, MARK)]}, 1),
        ({"tools": [tool("other", MARK)]}, 0),
        ({"tools": [tool("look", MARK), tool("more")]}, 0),
    ],
)
def test_what_a_change_leaves_of_tools_system_and_messages(server: Running, change: dict[str, Any], kept: int) -> None:
    base: dict[str, Any] = {
        "tools": [tool("look", MARK)],
        "system": [text("11 be kind " + LONG, MARK)],
        "messages": [user(text("11 " + LONG, MARK), text("x"))],
    }
    server.clock.now += 10_000.0
    ends = [sum(counts(create(server, **_until(base, section)))[:2]) for section in range(1, 4)]
    server.clock.now += 10_000.0
    create(server, **base)
    expected = [0, ends[0], ends[1], ends[2]][kept]
    assert counts(create(server, **{**base, **change}))[0] == expected


def _until(base: dict[str, Any], section: int) -> dict[str, Any]:
    """With the marker of this section only: what it writes is all up to there."""
    tools = [tool("look", MARK if section == 1 else None)]
    system = [text("11 be kind " + LONG, MARK if section == 2 else None)]
    messages = [user(text("11 " + LONG, MARK if section == 3 else None), text("x"))]
    return {**base, "tools": tools, "system": system, "messages": messages}


def test_a_request_for_no_tokens_warms_the_cache(server: Running) -> None:
    asked = user(text("12 " + LONG, MARK), text("x"))
    warm = create(server, asked, max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert counts(create(server, asked))[0] == counts(warm)[1] > 0
    with pytest.raises(anthropic.BadRequestError, match="nothing to stream"):
        create(server, asked, max_tokens=0, stream=True)


def test_a_stream_starts_with_its_usage(server: Running) -> None:
    asked = user(text("13 " + LONG, MARK), text("x"))
    written = counts(create(server, asked))[1]
    events = list(create(server, asked, stream=True))
    assert events[0].message.usage.cache_read_input_tokens == written
    assert events[-2].usage.output_tokens == 4


def test_usage_has_a_cost(server: Running) -> None:
    found = create(server, user(text("14 " + LONG, MARK), text("x")))
    read, written, plain = counts(found)
    assert read == 0
    assert found.usage.cost_usd == pytest.approx((1.25 * written + plain) * 5e-6 + 4 * 25e-6)


# Diagnostics


def diagnosed(server: Running, previous: str | None, name: str = "15 ", **options: Any) -> Any:
    asked = user(text(name + LONG, MARK), text("x"))
    return create(server, asked, diagnostics={"previous_message_id": previous}, **options)


def reason(found: Any) -> Any:
    return diagnostics(found)["cache_miss_reason"]


def test_nothing_is_diagnosed_unasked_and_nothing_found_where_nothing_changed(server: Running) -> None:
    assert diagnostics(create(server, user(text("x")))) is None
    first = diagnosed(server, None)
    assert reason(first) is None
    assert reason(diagnosed(server, first.id)) is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("model_changed", {"model": "tiny-too"}),
        ("tools_changed", {"tools": [tool("look")]}),
        ("system_changed", {"system": "be brief"}),
        ("messages_changed", {"name": "another "}),
    ],
)
def test_what_changed_is_named(server: Running, kind: str, options: dict[str, Any]) -> None:
    server.clock.now += 10_000.0
    first = diagnosed(server, None)
    missed = counts(first)[1]
    assert reason(diagnosed(server, first.id, **options)) == {"type": kind, "cache_missed_input_tokens": missed}
    assert missed > 0


def test_other_reasons_for_a_miss_are_named_too(server: Running) -> None:
    first = diagnosed(server, None)
    assert reason(diagnosed(server, "msg_unknown")) == {"type": "previous_message_not_found"}
    stranger = server.anthropic_as("key-b")
    assert reason(diagnosed(server, first.id, client=stranger)) == {"type": "previous_message_not_found"}
    server.clock.now += 10_000.0  # expired
    assert reason(diagnosed(server, first.id)) == {"type": "unavailable"}


# OpenAI


def chat(server: Running, *messages: Any, **options: Any) -> Any:
    asked: Any = {"model": "tiny", "max_tokens": 3, "messages": list(messages), **options}
    return server.openai.chat.completions.create(**asked).usage.prompt_tokens_details


def test_openai_prompts_are_cached_unasked(server: Running) -> None:
    turns: Any = [{"role": "system", "content": "16 " + LONG}, {"role": "user", "content": "who?"}]
    first = chat(server, *turns)
    assert (first.cached_tokens, first.cache_write_tokens > 32) == (0, True)
    turns += [{"role": "assistant", "content": "he"}, {"role": "user", "content": "and?"}]
    second = chat(server, *turns)
    assert second.cached_tokens == first.cache_write_tokens
    server.clock.now += 1800.0
    assert chat(server, *turns).cached_tokens == 0


def test_openai_has_one_price_for_writing(server: Running) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "21 " + LONG}]}
    usage: Any = server.openai.chat.completions.create(**ask).usage
    written = usage.prompt_tokens_details.cache_write_tokens
    expected = (1.25 * written + usage.prompt_tokens - written) * 5e-6 + 3 * 25e-6
    assert usage.cost_usd == pytest.approx(expected)


def test_an_openai_key_separates_prompts(server: Running) -> None:
    turns: Any = [{"role": "user", "content": "17 " + LONG}]
    chat(server, *turns, prompt_cache_key="one")
    assert chat(server, *turns, prompt_cache_key="two").cached_tokens == 0
    assert chat(server, *turns, prompt_cache_key="one").cached_tokens > 0


def test_explicit_mode_caches_at_breakpoints_only(server: Running) -> None:
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    plain: Any = {"role": "user", "content": [{"type": "text", "text": "18 " + LONG}]}
    for _ in range(2):
        assert chat(server, plain, extra_body=explicit).cached_tokens == 0
    part = {"type": "text", "text": "18 " + LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}
    marked: Any = {"role": "user", "content": [part, {"type": "text", "text": "x"}]}
    written = chat(server, marked, extra_body=explicit).cache_write_tokens
    assert chat(server, marked, extra_body=explicit).cached_tokens == written > 32


def test_responses_are_cached_too(server: Running) -> None:
    ask: Any = {"model": "tiny", "input": "19 " + LONG, "max_output_tokens": 2}
    first = server.openai.responses.create(**ask).usage
    second = server.openai.responses.create(**ask).usage
    assert first is not None
    assert second is not None
    assert second.input_tokens_details.cached_tokens == first.input_tokens_details.cache_write_tokens > 32


# Policies


def test_a_policy_that_compresses_reads_what_it_wrote() -> None:
    with running(tool_model(), "keydiff + 80tok") as server:
        asked = user(text(LONG * 3, MARK), text("who?"))
        cold, warm = (create(server, asked, max_tokens=24) for _ in range(2))
        assert counts(warm)[0] == counts(cold)[1] > 100
        assert warm.content[0].text == cold.content[0].text
        assert server.service.metrics.text().count('result="hit"} 1') == 1


def test_a_policy_that_knows_the_question_refuses_markers_and_serves_the_rest() -> None:
    with running(tool_model(), "snapkv + 80tok") as server:
        with pytest.raises(anthropic.BadRequestError, match="score snapkv is question-aware"):
            create(server, user(text(LONG, MARK)))
        assert counts(create(server, user(text(LONG * 3))))[:2] == (0, 0)
        assert chat(server, {"role": "user", "content": LONG}).cached_tokens == 0


def test_an_entry_whose_tensors_are_gone_is_a_miss(server: Running) -> None:
    asked = user(text("20 " + LONG, MARK), text("x"))
    written = counts(create(server, asked))[1]
    server.settle()
    store, lost_before = server.service.store, _num_lost(server)
    assert store is not None
    assert store.device is not None
    for tier in store.tiered.tiers:
        for key in list(tier.keys()):
            tier.delete(key)
    while store.device.shrink():
        pass
    assert counts(create(server, asked))[:2] == (0, written)
    assert _num_lost(server) == lost_before + 1


def _num_lost(server: Running) -> int:
    lines = server.service.metrics.text().splitlines()
    return next((int(line.split()[-1]) for line in lines if 'result="lost"' in line), 0)
