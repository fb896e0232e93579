"""The Messages API through Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvfold.serve.settings import Limits
from tests import tiny
from tests.engine.test_scheduler import alone
from tests.serve.running import Running, running, tool_model

HELLO: Any = [{"role": "user", "content": "the cat sat on the mat"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=256)) as found:
        yield found


def create(server: Running, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 12, "messages": HELLO, **options}
    return server.anthropic.messages.create(**options)


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
        final = stream.get_final_message()
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
