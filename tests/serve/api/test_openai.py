"""Chat completions, completions and responses through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.openai_chat import ChatWriter, CompletionWriter
from kvfold.serve.settings import Limits
from tests import tiny
from tests.engine.scheduling.test_scheduler import alone
from tests.serve.running import Running, running, tool_model

HELLO: Any = [{"role": "user", "content": "the cat sat on the mat"}]
RENDERED = "<user>the cat sat on the mat<end>\n<assistant>"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=256)) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    """What a single run writes."""
    model = tiny.ready("llama")
    return alone(model, model.tokenizer(RENDERED, add_special_tokens=False)["input_ids"], "full", 12)


def test_a_chat_completion_is_what_a_single_run_writes(server: Running, expected: str) -> None:
    found = server.openai.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=12)
    assert found.choices[0].message.content == expected
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


def test_a_chat_stream_adds_up(server: Running, expected: str) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=HELLO, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)


def test_a_text_completion_takes_the_prompt_as_it_is(server: Running, expected: str) -> None:
    found = server.openai.completions.create(model="tiny", prompt=RENDERED, max_tokens=12)
    assert found.choices[0].text == expected
    pieces = server.openai.completions.create(model="tiny", prompt=RENDERED, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_a_text_completion_takes_token_ids(server: Running, expected: str) -> None:
    ids = server.service.model.tokenizer(RENDERED, add_special_tokens=False)["input_ids"]
    for prompt in (ids, [ids]):
        found = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=12)
        assert (found.choices[0].text, found.usage and found.usage.prompt_tokens) == (expected, len(ids))
    wrongs: Any = ([-1], [1 << 20], [1.5], [True], [ids, ids], [[]])
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError, match=r"prompt: .*token ids"):
            server.openai.completions.create(model="tiny", prompt=wrong)


def test_a_reply_goes_on_behind_its_end_if_asked_to(expected: str) -> None:
    model = tool_model()
    ends = frozenset(model.tokenizer(expected[-1:], add_special_tokens=False)["input_ids"])
    with running(replace(model, spec=replace(model.spec, eos_token_ids=ends))) as server:
        create = partial(server.openai.chat.completions.create, model="tiny", messages=HELLO, max_tokens=40)
        ended, whole = create(), create(extra_body={"ignore_eos": True})
    assert ended.usage is not None and whole.usage is not None
    assert (ended.choices[0].finish_reason, whole.choices[0].finish_reason) == ("stop", "length")
    assert ended.usage.completion_tokens < whole.usage.completion_tokens == 40


def test_a_response_is_the_same_reply(server: Running, expected: str) -> None:
    found = server.openai.responses.create(model="tiny", input="the cat sat on the mat", max_output_tokens=12)
    assert found.output_text == expected
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert found.usage.output_tokens == 12


def test_a_response_stream_adds_up(server: Running, expected: str) -> None:
    with server.openai.responses.stream(model="tiny", input=HELLO, max_output_tokens=12) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].content[0].text == expected


def test_instructions_and_developer_messages_are_system_text(server: Running) -> None:
    by_response = server.openai.responses.create(
        model="tiny", instructions="be kind", input="hi", max_output_tokens=8, extra_body={"seed": 3}
    )
    messages: Any = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    by_chat = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert by_response.output_text == by_chat.choices[0].message.content
    without = server.openai.chat.completions.create(model="tiny", messages=messages[1:], max_tokens=8)
    assert without.choices[0].message.content != by_chat.choices[0].message.content


def test_a_seed_gives_the_same_sample(server: Running) -> None:
    def sample(seed: int) -> Any:
        options: Any = {"temperature": 1.5, "seed": seed, "max_tokens": 24}
        return server.openai.chat.completions.create(model="tiny", messages=HELLO, **options).choices[0].message.content

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


def test_tokens_are_counted(server: Running) -> None:
    found = server.openai.responses.input_tokens.count(model="tiny", input="the cat sat on the mat")
    expected = server.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).usage
    assert expected is not None
    assert found.input_tokens == expected.prompt_tokens


def test_models_are_listed(server: Running) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny", "tiny-too"]
    assert server.openai.models.retrieve("tiny").owned_by == "kvfold"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n: only 1 is supported, not 2; one reply is written for each request"),
        ({"logprobs": True}, "logprobs: only false is supported, not true; log probabilities are not computed here"),
        ({"store": True}, "store: only false is supported, not true; this server keeps no replies"),
        ({"logit_bias": {"1": 5}}, "logit_bias: only {} is supported; logits are not biased here"),
        (
            {"response_format": {"type": "json_object"}},
            'response_format.type: only "text" is supported, not "jso',
        ),
        ({"extra_body": {"top_k": 5}}, "top_k: the field is not supported here; supported: model, stream"),
        ({"prompt_cache_options": {"ttl": "12h"}}, 'prompt_cache_options.ttl: "12h" is not supported; supported: 30m'),
        ({"temperature": "hot"}, 'temperature: a number from 0 to 2 is required, not "hot"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'messages.0.content.0.type: "image_url"',
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(server: Running, options: dict[str, Any], message: str) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 2, **options}
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(**asked)
    body: Any = caught.value.body
    assert body["message"].startswith(message)
    assert body["param"] == message.split(":")[0]


def test_unknown_models_and_paths_are_not_found(server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match='"gpt" is not served here; served: tiny, tiny-too; start'):
        server.openai.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings here"):
        server.openai.embeddings.create(model="tiny", input="x")


def test_a_prompt_over_the_window_has_the_code_that_clients_look_for(server: Running) -> None:
    long = "the " * 900  # more tokens than the window
    wide = "a" * (1 << 16)  # more characters than any tokens of the window have
    for text in (long, wide):
        asked: Any = {"model": "tiny", "max_tokens": 2}
        chat = partial(server.openai.chat.completions.create, **asked, messages=[{"role": "user", "content": text}])
        plain = partial(server.openai.completions.create, **asked, prompt=text)
        response = partial(server.openai.responses.create, model="tiny", input=text)
        for send, param in ((chat, "messages"), (plain, "prompt"), (response, "input")):
            with pytest.raises(openai.BadRequestError, match="prompt is too long") as caught:
                send()
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_a_stream_that_ends_for_overload_has_a_code_that_openai_knows() -> None:
    for kind in (ChatWriter, CompletionWriter):
        failed = kind.__new__(kind).failed(ApiError(529, "later"))
        assert failed["error"]["code"] == 503
