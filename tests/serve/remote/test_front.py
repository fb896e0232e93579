"""Both vendors' APIs in front of an engine: words, streams, usage, tools, errors, cancelled requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvfold.errors import InputError
from kvfold.serve.auth import key_digest
from kvfold.serve.cache.breakpoints import Boundary
from kvfold.serve.remote.http import EngineHttp
from kvfold.serve.remote.service import EngineFacts
from kvfold.serve.remote.source import pack_boundary
from tests.serve.remote.fronting import Front, fronting
from tests.serve.running import Running, running, tool_model

HELLO: Any = [{"role": "user", "content": "the cat sat on the mat"}]
LONG = "the dog sat on the log and the cat sat on the mat " * 4


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    with running(tool_model()) as found:
        yield found


@pytest.fixture(scope="module")
def front(engine: Running) -> Iterator[Front]:
    with fronting(engine.url, engine.service.tokenizer) as found:
        yield found


def test_the_engine_tells_its_model_and_window(front: Front) -> None:
    assert front.service.max_positions == 1024
    assert [model.id for model in front.openai.models.list()] == ["tiny"]


def test_every_api_gives_the_engine_s_words(engine: Running, front: Front) -> None:
    def chat(server: Any) -> Any:
        return server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)

    expected, found = chat(engine), chat(front)
    text = expected.choices[0].message.content
    assert found.choices[0].message.content == text and len(text) > 4
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (expected.usage.prompt_tokens, 12)
    message = front.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=12)
    assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")  # type: ignore[union-attr]
    assert front.openai.responses.create(model="tiny", input=HELLO[0]["content"], max_output_tokens=16).output_text
    raw = "the cat sat"
    pair = [one.openai.completions.create(model="tiny", prompt=raw, max_tokens=8) for one in (engine, front)]
    assert pair[0].choices[0].text == pair[1].choices[0].text


def test_streams_add_up_and_samples_keep_their_seed(engine: Running, front: Front) -> None:
    whole = front.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    chunks = list(front.openai.chat.completions.create(model="tiny", messages=HELLO, **options))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content and len(list(filter(None, texts))) > 3
    assert chunks[-1].usage.completion_tokens == 12
    with front.anthropic.messages.stream(model="tiny", messages=HELLO, max_tokens=12) as stream:
        assert stream.get_final_text() == whole.choices[0].message.content
    sampled: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 1.5, "seed": 7}
    pair = [one.openai.chat.completions.create(**sampled).choices[0].message.content for one in (engine, front)]
    assert pair[0] == pair[1] != whole.choices[0].message.content
    del sampled["seed"]
    drawn = {front.openai.chat.completions.create(**sampled).choices[0].message.content for _ in range(3)}
    assert len(drawn) == 3


def test_a_stop_sequence_is_named(front: Front) -> None:
    whole = front.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=12).content[0].text  # type: ignore[union-attr]
    stop = whole[4:6]
    found = front.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=12, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]  # type: ignore[union-attr]


def test_usage_follows_markers_by_this_server_s_record(front: Front) -> None:
    def ask(question: str) -> Any:
        system: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
        turns: Any = [{"role": "user", "content": question}]
        return front.anthropic.messages.create(model="tiny", system=system, messages=turns, max_tokens=2).usage

    first, second = ask("who"), ask("where")
    assert first.cache_creation_input_tokens > 32 and first.cache_read_input_tokens == 0
    assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (
        first.cache_creation_input_tokens,
        0,
    )
    front.clock.now += 301
    assert ask("when").cache_read_input_tokens == 0, "five minutes are over"


def test_a_client_that_leaves_ends_the_request_at_the_engine(engine: Running, front: Front) -> None:
    before = engine.service.scheduler.num_cancelled
    options: Any = {"stream": True, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = front.openai.chat.completions.create(model="tiny", messages=HELLO, **options)
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 30
    while engine.service.scheduler.num_cancelled == before and time.monotonic() < until:
        time.sleep(0.05)
    assert engine.service.scheduler.num_cancelled == before + 1
    assert front.service.scheduler.num_cancelled >= 1


def test_an_engine_that_is_down_is_a_503_in_both_shapes(engine: Running) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with fronting(url, engine.service.tokenizer, facts=EngineFacts("tiny", 1024)) as front:
        with pytest.raises(openai.InternalServerError, match="does not answer; send the request again") as caught:
            front.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        with pytest.raises(anthropic.APIStatusError) as told:
            front.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=2)
        assert told.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_an_engine_that_refuses_is_a_502_with_its_words() -> None:
    with running(tool_model(), tenants={key_digest("right"): "a"}, key="right") as engine:
        facts = EngineFacts("tiny", 1024)
        with fronting(engine.url, engine.service.tokenizer, facts=facts, key="wrong") as front:
            with pytest.raises(
                openai.InternalServerError,
                match=r"refused the request \(status 401; its key goes into --engine-key\): ",
            ) as caught:
                front.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
            assert caught.value.status_code == 502
        with fronting(engine.url, engine.service.tokenizer, key="right") as front:
            found = front.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
            assert found.usage is not None and found.usage.completion_tokens == 2
            with pytest.raises(openai.BadRequestError, match="prompt is too long"):
                front.openai.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "the " * 1100}]
                )


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x/?a=1", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="is no address of a server"):
        EngineHttp(url)


def test_prefixes_are_packed_where_they_have_doubled_and_never_the_last_block() -> None:
    ends = [100, 600, 700, 1300, 2300, 2700, 2800]
    boundaries = [Boundary(end, str(end).encode(), "messages") for end in ends]
    packed = [pack_boundary(boundaries[:count], 512) for count in range(len(ends) + 1)]
    assert [None if one is None else one.end for one in packed] == [None, None, None, 600, 600, 1300, 1300, 2700]
