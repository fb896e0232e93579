"""Valid bodies of every route that takes one, with most of what is supported, and answers in a vendor's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from http.client import HTTPConnection, HTTPResponse
from typing import Any, NamedTuple

from tests.serve.running import Running

Json = dict[str, Any]
_SCHEMA: Json = {"type": "object", "properties": {"at": {"type": "string"}}, "maximum": 1.5}
_MARK: Json = {"type": "ephemeral"}

_MESSAGES: Json = {
    "model": "tiny",
    "system": [{"type": "text", "text": "be kind", "cache_control": _MARK}],
    "tools": [{"name": "look", "description": "look it up", "input_schema": _SCHEMA}],
    "messages": [
        {"role": "user", "content": "where is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "home", "depth": 2.5}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "gone", "cache_control": _MARK}],
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
    "tool_choice": {"type": "auto"},
}
_CHAT: Json = {
    "model": "tiny",
    "max_tokens": 2,
    "messages": [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "where?", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "home"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "gone"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "it", "parameters": _SCHEMA}}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "stop": ["\n\n"],
    "prompt_cache_key": "a",
    "user": "u",
}
_RESPONSE: Json = {
    "model": "tiny",
    "instructions": "be kind",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "home"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "gone"},
    ],
    "tools": [{"type": "function", "name": "look", "description": "it", "parameters": _SCHEMA}],
}
BODIES: dict[str, Json] = {
    "/v1/messages": {**_MESSAGES, "max_tokens": 2, "metadata": {"user_id": "u"}, "stop_sequences": ["\n\n"]},
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "the cat", "max_tokens": 2, "stop": "\n\n", "user": "u"},
    "/v1/responses": {**_RESPONSE, "max_output_tokens": 2, "prompt_cache_key": "a", "user": "u"},
    "/v1/responses/input_tokens": _RESPONSE,
}

Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all that is neither an object nor a list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        yield path
        return
    for name, item in inside:
        yield from leaves(item, (*path, name))


def objects(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all objects."""
    if isinstance(value, dict):
        yield path
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects(item, (*path, name))


def at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def replaced(body: Any, path: Path, value: Any) -> Any:
    """A copy with another value there."""
    found = deepcopy(body)
    if not path:
        return value
    at(found, path[:-1])[path[-1]] = value
    return found


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def call(server: Running, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> Answer:
    """Bytes and texts are sent as they are, anything else as JSON."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    raw = body if body is None or isinstance(body, bytes | str) else json.dumps(body)
    sent = {} if raw is None else {"content-type": "application/json"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, raw, {**sent, **named})
    answer: HTTPResponse = connection.getresponse()
    found = Answer(answer.status, answer.headers, answer.read().decode())
    connection.close()
    return found


def check_refused(answer: Answer, path: str, status: int = 400) -> str:
    """The message of an error in the shape that the path's vendor gives it."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["request-id"].startswith("req_")
    found = answer.json
    if path.startswith("/v1/messages"):
        assert found["type"] == "error"
        assert found["request_id"] == answer.headers["request-id"]
        assert isinstance(found["error"]["type"], str)
    else:
        assert set(found["error"]) == {"message", "type", "param", "code"}
    message = found["error"]["message"]
    assert isinstance(message, str)
    assert 0 < len(message) < 2000
    return message
