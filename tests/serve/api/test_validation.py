"""Fields are honoured or refused: what a request says is seen in prompt or answer; neutral values are taken."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvfold.serve.settings import Limits
from kvfold.store.key import PAGE_LEN
from tests.serve.asking import SECRET, until
from tests.serve.bodies import call
from tests.serve.running import Running, running, tool_model, typed

HELLO: Any = [{"role": "user", "content": "hi"}]
LONG = SECRET * 12
SCHEMA: Any = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=64)) as found:
        yield found


# Honoured


def prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the prompts that are made from now on."""
    found: list[str] = []
    renderer, prompt = server.service.renderer, server.service.renderer.prompt

    def noted(ask: Any) -> Any:
        made = prompt(ask)
        found.append(server.service.model.tokenizer.decode(made.tokens))
        return made

    monkeypatch.setattr(renderer, "prompt", noted)
    return found


def results(content: Any, **more: Any) -> list[Any]:
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, **more}
    return [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def test_the_model_is_told_that_a_tool_failed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prompts(server, monkeypatch)
    for is_error in (False, True):
        messages = results("no such file", is_error=is_error)
        server.anthropic.messages.create(model="tiny", max_tokens=1, messages=messages)
    assert "<tool>no such file<end>" in found[0]
    assert "<tool>Error: no such file<end>" in found[1]


def test_names_of_participants_stand_before_their_texts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prompts(server, monkeypatch)
    messages: Any = [{**HELLO[0], "name": "ann"}, {"role": "user", "name": "bob", "content": "ho"}]
    server.openai.chat.completions.create(model="tiny", max_tokens=1, messages=messages)
    assert "<user>ann: hi\nbob: ho<end>" in found[0]


def test_a_marker_in_the_content_of_a_result_caches(server: Running) -> None:
    content = [{"type": "text", "text": LONG + "result", "cache_control": {"type": "ephemeral"}}]
    usages = []
    for _ in range(2):
        usages.append(server.anthropic.messages.create(model="tiny", max_tokens=1, messages=results(content)).usage)
        server.settle()
    written, read = usages[0].cache_creation_input_tokens, usages[1].cache_read_input_tokens
    assert written == read
    assert written is not None
    assert written > 400


def test_a_breakpoint_on_a_part_of_a_tool_message_caches(server: Running) -> None:
    part = {"type": "text", "text": LONG + "part", "prompt_cache_breakpoint": {"mode": "explicit"}}
    function = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = [*HELLO, {"role": "assistant", "tool_calls": [function]}]
    messages: Any = [*called, {"role": "tool", "tool_call_id": "1", "name": "look", "content": [part]}]
    options: Any = {"model": "tiny", "max_tokens": 1, "extra_body": {"prompt_cache_options": {"mode": "explicit"}}}
    for is_read in (False, True):
        usage: Any = server.openai.chat.completions.create(messages=messages, **options).to_dict()["usage"]
        server.settle()
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 400) == is_read
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{**part, "type": "input_text"}]},
    ]
    body = {"model": "tiny", "max_output_tokens": 1, "input": items, "prompt_cache_options": {"mode": "explicit"}}
    assert call(server, "/v1/responses", body).json["usage"]["input_tokens_details"]["cached_tokens"] > 400


def test_a_text_completion_is_cached_up_to_the_page_of_its_last_token(server: Running) -> None:
    found = []
    for prompt in (LONG + "raw", LONG + "raw", [LONG + "raw"]):
        usage: Any = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=1).to_dict()["usage"]
        found.append(usage["prompt_tokens_details"])
        server.settle()
    length, reused = usage["prompt_tokens"], (usage["prompt_tokens"] - 1) // PAGE_LEN * PAGE_LEN
    assert [one["cache_write_tokens"] for one in found] == [length, 0, 0]
    assert [one["cached_tokens"] for one in found] == [0, reused, reused]


def test_models_come_in_pages(server: Running) -> None:
    first = typed(server.anthropic.models.list, limit=1)
    assert ([model.id for model in first.data], first.has_more, first.last_id) == (["tiny"], True, "tiny")
    assert [model.id for model in first] == ["tiny", "tiny-too"], "the client asks for the next page"
    last = typed(server.anthropic.models.list, limit=1, before_id="tiny-too")
    assert ([model.id for model in last.data], last.has_more) == (["tiny"], False)
    assert typed(server.anthropic.models.list, after_id="tiny-too").data == []
    wrong = ("limit=0", "limit=1001", "limit=x", "limit=", "after_id=x", "before_id=", "after_id=tiny&before_id=tiny")
    for query in wrong:
        assert call(server, f"/v1/models?{query}", method="GET").status == 400, query


def test_a_response_repeats_what_was_asked(server: Running) -> None:
    asked: Any = {"instructions": "be kind", "max_output_tokens": 2, "temperature": 0.5, "metadata": {"run": "7"}}
    found = server.openai.responses.create(model="tiny", input="hi", **asked).to_dict()
    assert {name: found[name] for name in asked} == asked
    plain = server.openai.responses.create(model="tiny", input="hi").to_dict()
    expected: Any = {"instructions": None, "max_output_tokens": None, "metadata": {}, "temperature": 0.0, "top_p": 1.0}
    assert {name: plain[name] for name in expected} == expected
    assert (plain["store"], plain["truncation"], plain["text"]) == (False, "disabled", {"format": {"type": "text"}})


# Neutral values, through the vendors' own clients

CHAT: Any = {
    "metadata": {"run": "7"}, "store": False, "n": 1, "logprobs": False, "top_logprobs": None, "logit_bias": {},
    "presence_penalty": 0, "frequency_penalty": 0.0, "parallel_tool_calls": True, "reasoning_effort": None,
    "stop": None, "user": "u", "safety_identifier": "s", "service_tier": "auto", "response_format": {"type": "text"},
    "seed": None,
    "modalities": ["text"], "tools": [], "tool_choice": "auto", "verbosity": "medium", "prompt_cache_key": "k",
}  # fmt: skip
COMPLETION: Any = {
    "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "logit_bias": {}, "presence_penalty": 0,
    "frequency_penalty": 0, "stop": None, "user": "u",
}  # fmt: skip
RESPONSE: Any = {
    "metadata": {}, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "include": [], "background": False,
    "store": False, "truncation": "disabled", "reasoning": {"effort": None, "summary": None}, "top_logprobs": 0,
    "parallel_tool_calls": True, "previous_response_id": None, "service_tier": "default", "user": "u", "tools": [],
    "tool_choice": "auto", "max_tool_calls": None, "prompt": None, "conversation": None, "instructions": None,
}  # fmt: skip
MESSAGE: Any = {
    "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "stop_sequences": [],
    "tools": [{"name": "look", "input_schema": SCHEMA, "strict": False}], "output_config": {"effort": "high"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "speed": "standard", "container": None,
    "mcp_servers": [], "context_management": {"edits": []}, "system": "",
}  # fmt: skip


def together_and_alone(fields: Any) -> list[Any]:
    return [fields, *({name: value} for name, value in fields.items() if name != "tool_choice")]


def test_chats_take_neutral_values(server: Running) -> None:
    for more in together_and_alone(CHAT):
        typed(server.openai.chat.completions.create, model="tiny", messages=HELLO, max_tokens=1, **more)
    options: Any = {"stream_options": {"include_usage": False, "include_obfuscation": False}, "stream": True}
    assert list(server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, **options))


def test_text_completions_take_neutral_values(server: Running) -> None:
    for more in together_and_alone(COMPLETION):
        typed(server.openai.completions.create, model="tiny", prompt="hi", max_tokens=1, **more)


def test_responses_take_neutral_values(server: Running) -> None:
    for more in [*together_and_alone(RESPONSE), {"include": ["reasoning.encrypted_content"]}]:
        typed(server.openai.responses.create, model="tiny", input="hi", max_output_tokens=1, **more)
    typed(server.openai.responses.input_tokens.count, model="tiny", input="hi", text={"format": {"type": "text"}})


def test_messages_take_neutral_values(server: Running) -> None:
    for more in together_and_alone(MESSAGE):
        typed(server.anthropic.messages.create, model="tiny", max_tokens=1, messages=HELLO, **more)
    kept = {name: MESSAGE[name] for name in ("thinking", "output_config", "speed", "tools", "system")}
    typed(server.anthropic.messages.count_tokens, model="tiny", messages=HELLO, **kept)


def test_replies_can_be_sent_back_as_they_came(server: Running) -> None:
    first = server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    messages: Any = [*HELLO, first.choices[0].message.model_dump(), *HELLO]
    server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    response = server.openai.responses.create(model="tiny", input="hi", max_output_tokens=4)
    items: Any = [*HELLO, *(item.model_dump() for item in response.output), *HELLO]
    server.openai.responses.create(model="tiny", input=items, max_output_tokens=1)
    message = server.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=4)
    turns: Any = [*HELLO, {"role": "assistant", "content": [block.model_dump() for block in message.content]}, *HELLO]
    server.anthropic.messages.create(model="tiny", messages=turns, max_tokens=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": True}, "n: only 1 is supported, not true; one reply is written for each request"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: only 0 is supported, not 0.5; penalties are not applied here"),
        (
            {"parallel_tool_calls": False},
            "parallel_tool_calls: only true is supported, not false; the number of calls is",
        ),
        (
            {"reasoning_effort": "high"},
            'reasoning_effort: only "none" is supported, not "high"; how much the model thinks is not',
        ),
        ({"modalities": ["text", "audio"]}, 'modalities: only ["text"] is supported; replies are text'),
        ({"tool_choice": "required"}, 'tool_choice: "required" is not supported; supported: auto, none'),
        ({"tool_choice": {"type": "function"}}, "tool_choice: an object is not supported; supported: auto, none"),
        ({"metadata": {"a": 1}}, "metadata: up to 16 pairs of strings are required"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata: up to 16 pairs of strings are required"),
    ],
)
def test_other_values_are_refused_with_what_is_taken(server: Running, more: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        typed(server.openai.chat.completions.create, model="tiny", messages=HELLO, **more)
    body: Any = caught.value.body
    assert body["message"].startswith(message)


# What the server says of refusals


def test_a_refusal_is_logged_and_shown_with_its_reason_and_nothing_else(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    marker = "\nsecret words"
    bodies: list[Any] = [
        {"model": "tiny", "max_tokens": marker, "messages": HELLO},
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": marker, "content": marker}]},
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": marker}]}]},
        {"model": "tiny", "max_tokens": 1, "messages": results(marker)[1:]},
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": marker + "\ud800"}]},
    ]
    with caplog.at_level(logging.INFO, "kvfold.serve"):
        for body in bodies:
            assert call(server, "/v1/messages", body).status == 400
        until(lambda: len(caplog.records) >= len(bodies))
    said: list[Any] = [getattr(record, "facts", {}) for record in caplog.records]
    assert said[0]["why"] == "max_tokens: a whole number from 0 to 64 is required"
    assert all(facts["why"] for facts in said)
    assert "secret" not in json.dumps(said)
    rows = call(server, "/dashboard/state", method="GET").json["requests"]
    assert [row["why"] for row in rows[: len(bodies)]] == [facts["why"] for facts in reversed(said)]


def test_an_unknown_model_is_told_how_to_get_a_name(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="--alias"):
        server.anthropic.messages.create(model="claude-x", max_tokens=1, messages=HELLO)
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.models.retrieve("gpt-x")
    assert caught.value.code == "model_not_found"
