"""Many streams at once, whose texts are sent in one call, say what the same requests say without a stream."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kvfold.serve.batch_send import prepare
from tests.serve.asking import get
from tests.serve.running import Running, running, tool_model

TOOL: Any = {"type": "object", "properties": {}}
ASKED: Any = {
    "/v1/messages": {"max_tokens": 40, "messages": [{"role": "user", "content": "the cat sat"}]},
    "/v1/chat/completions": {"max_tokens": 40, "messages": [{"role": "user", "content": "the dog ran"}]},
    "/v1/completions": {"max_tokens": 40, "prompt": "the bird sang"},
    "/v1/responses": {"max_output_tokens": 40, "input": "the fish swam"},
}


def ask(server: Running, path: str, *, is_streamed: bool, with_tools: bool) -> str:
    body = {"model": "tiny", "temperature": 0, "stream": is_streamed, **ASKED[path]}
    if with_tools and path == "/v1/messages":
        body["tools"] = [{"name": "look", "input_schema": TOOL}]
    if with_tools and path == "/v1/chat/completions":
        body["tools"] = [{"type": "function", "function": {"name": "look", "parameters": TOOL}}]
    status, text, _ = get(server, path, json.dumps(body))
    assert status == 200
    return text


def streamed_text(path: str, stream: str) -> str:
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == "/v1/messages":
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert whole_text(path, json.dumps(events[-1]["response"])) == text
        return text
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def whole_text(path: str, text: str) -> str:
    reply = json.loads(text)
    if path == "/v1/messages":
        return "".join(block["text"] for block in reply["content"])
    if path == "/v1/responses":
        return "".join(part["text"] for item in reply["output"] for part in item["content"])
    choice = reply["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("with_tools", [False, True])
def test_streams_say_what_whole_replies_say(with_tools: bool) -> None:
    pytest.importorskip("numba")
    prepare()
    paths = [*ASKED] * 3
    with running(tool_model()) as server, ThreadPoolExecutor(len(paths)) as clients:
        wholes = {path: ask(server, path, is_streamed=False, with_tools=with_tools) for path in ASKED}
        one = partial(ask, server, is_streamed=True, with_tools=with_tools)
        streams = list(clients.map(one, paths))
    for path, stream in zip(paths, streams, strict=True):
        assert streamed_text(path, stream) == whole_text(path, wholes[path])
