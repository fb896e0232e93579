"""The Messages API through Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvfold.serve.settings import Limits
from tests import tiny
from tests.engine.scheduling.test_scheduler import alone
from tests.serve.running import Running, running, tool_model, typed

HELLO: Any = [{"role": "user", "content": "the cat sat on the mat"}]
TOOL: Any = {"name": "look", "description": "look it up", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=256)) as found:
        yield found


def create(server: Running, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 12, "messages": HELLO, **options}
    return typed(server.anthropic.messages.create, **options)


def test_a_message_is_what_a_single_run_writes(server: Running) -> None:
    found = create(server)
    model = tiny.ready("llama")
    ids = model.tokenizer("<user>the cat sat on the mat<end>\n<assistant>", add_special_tokens=False)["input_ids"]
    assert found.content[0].text == alone(model, ids, "full", 12)
    assert (found.stop_reason, found.role, found.model) == ("max_tokens", "assistant", "tiny")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), 12)
    assert found.id.startswith("msg_")
    assert found._request_id.startswith("req_")


def test_a_stream_adds_up_to_the_message(server: Running) -> None:
    whole = create(server)
    with server.anthropic.messages.stream(model="tiny", max_tokens=12, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert kinds[0] == "message_start"
    assert kinds[1] == "content_block_start"
    assert kinds[-1] == "message_stop"


def test_a_stop_sequence_is_named(server: Running) -> None:
    text = create(server).content[0].text
    found = create(server, stop_sequences=[text[4:6]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[4:6])
    assert found.content[0].text == text[: text.index(text[4:6])]


def test_tokens_are_counted_as_they_are_billed(server: Running) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "system": "be kind", "tools": [TOOL]}
    counted = typed(server.anthropic.messages.count_tokens, **options, cache_control={"type": "ephemeral"})
    assert counted.input_tokens == create(server, **options).usage.input_tokens
    assert counted.input_tokens > create(server).usage.input_tokens


def test_models_are_listed(server: Running) -> None:
    assert [model.id for model in server.anthropic.models.list()] == ["tiny", "tiny-too"]
    assert server.anthropic.models.retrieve("tiny").max_input_tokens == 1023


def test_old_headers_are_taken_too(server: Running) -> None:
    old = server.anthropic_as("any", default_headers={"anthropic-version": "2023-06-01", "x-api-key": "any"})
    assert old.messages.create(model="tiny", max_tokens=2, messages=HELLO).usage.output_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 257}, "max_tokens: a whole number from 0 to 256 is required, not 257"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 'thinking.type: only "disabled" is'),
        (
            {"tool_choice": {"type": "any"}, "tools": [TOOL]},
            'tool_choice.type: "any" is not supported; supported: auto',
        ),
        ({"output_config": {"effort": "low"}}, 'output_config.effort: only "high" is supported, not "low"; '),
        ({"messages": []}, "messages: at least one message is required, and the first must be the user's"),
        (
            {"messages": [{"role": "system", "content": "x"}, *HELLO]},
            "messages.0: the first must be the user's; put the system prompt into the field system",
        ),
        (
            {"messages": [*HELLO, {"role": "system", "content": "x"}, *HELLO]},
            "messages.1: a system message follows a user's, and the assistant's or nothing comes next; a system ",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages: the last one must not be the assi"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'messages.0.content.0.type: "image" is not'),
        ({"messages": [{"role": "user", "content": "the " * 900}]}, "prompt is too long: "),
        ({"stop_sequences": [""]}, "stop_sequences: up to 16 non-empty strings are required"),
        ({"system": [{"type": "text", "text": "a", "x": 1}]}, "system.0.x: the field is not supported here"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(server: Running, options: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(server, **{"extra_body": {}, **options})
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(message)
    assert body["request_id"].startswith("req_")


def test_an_unknown_model_is_not_found(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match='"claude" is not served here'):
        create(server, model="claude")


def test_the_window_of_the_model_ends_a_reply(server: Running) -> None:
    found = create(server, max_tokens=200, messages=[{"role": "user", "content": "the " * 330}])
    assert found.stop_reason == "model_context_window_exceeded"
    assert found.usage.input_tokens + found.usage.output_tokens == 1024
