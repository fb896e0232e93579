"""Requests that no server can honour are answered with a 4xx in the vendor's shape, whatever is wrong and wherever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvfold.serve.settings import Limits
from tests.serve.bodies import BODIES, at, call, check_refused, leaves, objects, replaced
from tests.serve.running import Running, running, tool_model

HOLE = "@here@"
HELLO: Any = [{"role": "user", "content": "hi"}]
NESTED = "[" * 600 + "]" * 600
NUMBERS = ("NaN", "-Infinity", "1e999", "-1e400", "1" + "0" * 400, "1" * 10_000)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=64)) as found:
        yield found


def ask(server: Running, path: str, **more: Any) -> Any:
    """A short body with fields added or, with None, without them."""
    field = "prompt" if path == "/v1/completions" else "input" if "responses" in path else "messages"
    limit = {} if path.endswith("tokens") else {"max_output_tokens" if "responses" in path else "max_tokens": 2}
    body = {"model": "tiny", field: HELLO if field != "prompt" else "hi", **limit, **more}
    return call(server, path, body)


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_of_these_tests_are_valid(server: Running, path: str) -> None:
    assert call(server, path, BODIES[path]).status == 200


# JSON that is none, or that nothing can be done with


@pytest.mark.parametrize("path", BODIES)
def test_half_a_character_is_refused_wherever_a_text_can_stand(server: Running, path: str) -> None:
    body = BODIES[path]
    texts = [boundary for boundary in leaves(body) if isinstance(at(body, boundary), str)]
    assert len(texts) >= 3
    for boundary in texts:
        answer = call(server, path, replaced(body, boundary, at(body, boundary) + "\ud83d"))
        assert "surrogate" in check_refused(answer, path), boundary
    for boundary in objects(body):
        answer = call(server, path, replaced(body, (*boundary, "x\udc00"), 1))
        assert "surrogate" in check_refused(answer, path), boundary


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:6])
def test_numbers_that_no_machine_holds_are_refused_anywhere(server: Running, path: str, number: str) -> None:
    for boundary in leaves(BODIES[path]):
        raw = json.dumps(replaced(BODIES[path], boundary, HOLE)).replace(f'"{HOLE}"', number)
        check_refused(call(server, path, raw), path)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [120, 600, 960, 12_000])
def test_deep_nesting_is_refused_anywhere(server: Running, path: str, depth: int) -> None:
    boundaries = list(leaves(BODIES[path])) if depth < 1000 else [("model",)]
    for boundary in boundaries:
        for opens, closes in (("[", "]"), ('{"a":', "}")):
            deep = opens * depth + "0" + closes * depth
            raw = json.dumps(replaced(BODIES[path], boundary, HOLE)).replace(f'"{HOLE}"', deep)
            assert "nested" in check_refused(call(server, path, raw), path), boundary


@pytest.mark.parametrize("path", BODIES)
def test_a_key_that_comes_twice_is_refused(server: Running, path: str) -> None:
    for boundary in objects(BODIES[path]):
        marked = replaced(BODIES[path], (*boundary, HOLE), 0)
        name = next(iter(at(BODIES[path], boundary)))
        raw = json.dumps(marked).replace(f'"{HOLE}"', json.dumps(name))
        assert "twice" in check_refused(call(server, path, raw), path), boundary


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"null", b"7", b'"x"', b"[]", b"{} {}", b'{"model": "\xff"}', '{"a": 1}'.encode("utf-16"), b"\0"]
)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_json_object_is_refused(server: Running, path: str, raw: bytes) -> None:
    check_refused(call(server, path, raw), path)
    assert call(server, path, b"\xef\xbb\xbf" + json.dumps(BODIES[path]).encode()).status == 200, "a byte order mark"


def test_what_an_error_quotes_is_short_and_one_line(server: Running) -> None:
    named: Any = {"model": "a\nb\x1b[0m" + "x" * 500}
    for more in (named, {"x\ny" * 500: 1}, {"tool_choice": "\r\n" * 100}, {"n": "x" * 5000}):
        for path in ("/v1/messages", "/v1/chat/completions"):
            answer = ask(server, path, **more)
            message = check_refused(answer, path, answer.status)
            assert answer.status in (400, 404)
            assert len(message) < 900
            assert message.isprintable()


# Verbs, headers, content types


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_verb_is_told_which_are_right(server: Running, path: str, method: str) -> None:
    answer = call(server, path, method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    if method != "HEAD":
        assert f"{path} takes POST, not {method}" in check_refused(answer, path, 405)


def test_every_path_has_verbs(server: Running) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/metrics", "/", "/dashboard/state"):
        answer = call(server, path, method="PATCH")
        check_refused(answer, path, 405)
        assert answer.headers["allow"] == "GET, HEAD"
    for method in ("PATCH", "TRACE", "POST"):
        check_refused(call(server, "/v1/nothing", method=method), "", 404)
        check_refused(call(server, "/v1/messages/batches", method=method), "/v1/messages", 404)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/x-www-form-urlencoded", 400),
        ("text/plain", 400),
        ("multipart/form-data; boundary=x", 400),
        ("\xff", 400),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_json_by_their_content_type_too(server: Running, path: str, kind: str, status: int) -> None:
    answer = call(server, path, BODIES[path], content_type=kind)
    assert answer.status == status
    if status == 400:
        assert "application/json" in check_refused(answer, path)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_not_compressed(server: Running, path: str) -> None:
    """A header that says so is refused, though the body itself is plain: proxies would read it otherwise."""
    assert call(server, path, BODIES[path], content_encoding="identity").status == 200
    for encoding in ("gzip", "identity, gzip", "\xff", ""):
        answer = call(server, path, BODIES[path], content_encoding=encoding)
        assert check_refused(answer, path).startswith("content-encoding: bodies are not compressed")


@pytest.mark.parametrize("version", ["1999-01-01", "", "2023-06-01x", "\xff"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_version_that_never_was_is_refused(server: Running, path: str, version: str) -> None:
    message = check_refused(call(server, path, BODIES[path], anthropic_version=version), path)
    assert message.startswith("anthropic-version: ")
    for known in ("2023-01-01", "2023-06-01"):
        assert call(server, path, BODIES[path], anthropic_version=known).status == 200


# What the vendors refuse


def tool_turns(call_id: str = "1", result_id: str = "1") -> list[Any]:
    use = {"type": "tool_use", "id": call_id, "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": result_id, "content": "x"}
    return [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


USE: Any = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}


def said(*content: Any) -> list[Any]:
    """User, assistant, user in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": item} for i, item in enumerate(content)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": said("")}, "messages.0.content: a text that is not empty is required"),
        ({"messages": said([])}, "messages.0.content: at least one block is required"),
        ({"messages": said([{"type": "text", "text": ""}])}, "messages.0.content.0.text: a text that is not empty"),
        ({"messages": said("a", "", "b")}, "messages.1.content: a text that is not empty is required"),
        ({"messages": said("a", [], "b")}, "messages.1.content: at least one block is required"),
        ({"system": [{"type": "text", "text": ""}]}, "system.0.text: a text that is not empty is required"),
        ({"messages": said([RESULT])}, 'messages: the result of call "1" follows no such call'),
        ({"messages": said("a", [{**USE, "id": "2"}], [RESULT])}, 'messages: the result of call "1" follows no such'),
        ({"messages": said("a", [USE], [RESULT, RESULT])}, 'messages: the result of call "1" comes twice'),
        ({"messages": said("a", [USE, USE], [RESULT])}, 'messages: two calls have the id "1"'),
        ({"messages": said("a", [USE], "b")}, 'messages: the call "1" has no result'),
        ({"messages": said("a", [{**USE, "input": []}], [RESULT])}, "messages.1.content.0.input: an object is re"),
        ({"messages": said("a", [{**USE, "input": "{}"}], [RESULT])}, "messages.1.content.0.input: an object is req"),
        (
            {"messages": said("a", [USE], [{**RESULT, "content": [{"type": "text", "text": ""}]}])},
            "messages.2.content.0.content.0.text: a text that is not empty is required",
        ),
        (
            {"messages": said("a", [USE], [{**RESULT, "content": "", "is_error": True}])},
            "messages.2.content.0.content: an error has a text",
        ),
        ({"tools": [TOOL, TOOL]}, 'tools.1.name: "look" is the name of tools.0 too'),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools.0.input_schema: an object is required, not a list"),
        ({"tools": [{**TOOL, "input_schema": "x"}]}, "tools.0.input_schema: an object is required, not a string"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools.0.name: 1 to 128 letters, digits, _ and - are required"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropic_refuses_it(server: Running, path: str, more: Any, message: str) -> None:
    assert check_refused(ask(server, path, **more), path).startswith(message)


CALL: Any = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLS: Any = {"role": "assistant", "tool_calls": [CALL]}
ANSWER: Any = {"role": "tool", "tool_call_id": "1", "content": "x"}
FUNCTION: Any = {"type": "function", "function": {"name": "look"}}
STREAM: Any = {"include_usage": True}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: at least one part is required"),
        ({"messages": [*HELLO, ANSWER]}, 'messages: the result of call "1" follows no such call'),
        ({"messages": [*HELLO, CALLS, ANSWER, ANSWER]}, 'messages: the result of call "1" comes twice'),
        ({"messages": [*HELLO, CALLS, *HELLO]}, 'messages: the call "1" has no result'),
        (
            {"messages": [*HELLO, {**CALLS, "tool_calls": [{**CALL, "type": "x"}]}, ANSWER]},
            'messages.1.tool_calls.0.type: "x" is not supported; supported: function',
        ),
        ({"messages": [*HELLO, CALLS, {**ANSWER, "name": "other"}]}, "messages.2.name: the call is of look"),
        ({"messages": [{**HELLO[0], "name": "a b"}]}, "messages.0.name: 1 to 64 characters without white space"),
        ({"tools": [FUNCTION, FUNCTION]}, 'tools.1.function.name: "look" is the name of tools.0.function too'),
        (
            {"tools": [{"type": "function", "function": {"name": "look", "parameters": [1]}}]},
            "tools.0.function.parameters: an object is required, not a list",
        ),
        ({"stream_options": STREAM}, "stream_options: the field is for streams; leave it out, or set stream to true"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens: max_completion_tokens is given too"),
    ],
)
def test_openai_refuses_it_in_chats(server: Running, more: Any, message: str) -> None:
    path = "/v1/chat/completions"
    answer = ask(server, path, **more)
    assert check_refused(answer, path).startswith(message)
    assert answer.json["error"]["param"] == message.split(":")[0]


OUTPUT: Any = {"type": "function_call_output", "call_id": "1", "output": "x"}
USED: Any = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input": []}, "input: a string or a list of items is required"),
        ({"input": [{"role": "user", "content": []}]}, "input.0.content: at least one part is required"),
        ({"input": [*HELLO, OUTPUT]}, 'input: the result of call "1" follows no such call'),
        ({"input": [*HELLO, USED, *HELLO]}, 'input: the call "1" has no result'),
        ({"input": [*HELLO, {**USED, "arguments": "[NaN]"}, OUTPUT]}, "input.1.arguments: the text of a JSON object"),
        ({"input": [*HELLO, {**USED, "arguments": '{"a": 1e999}'}, OUTPUT]}, "input.1.arguments: the text of a JSON"),
        ({"tools": [{"type": "function", "name": "look", "parameters": 7}]}, "tools.0.parameters: an object is r"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_openai_refuses_it_in_responses(server: Running, path: str, more: Any, message: str) -> None:
    assert check_refused(ask(server, path, **more), path).startswith(message)


def test_openai_takes_an_empty_message(server: Running) -> None:
    empty = [{"role": "user", "content": ""}]
    for messages in (empty, [*empty, *HELLO], [*HELLO, *empty]):
        assert ask(server, "/v1/chat/completions", messages=messages).status == 200
        assert ask(server, "/v1/responses", input=messages).status == 200
    assert ask(server, "/v1/responses", input="").status == 200


# Failures of the server's own


@pytest.mark.parametrize("path", BODIES)
def test_an_exception_in_a_handler_is_a_500_in_the_vendors_shape(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RecursionError("a secret")

    monkeypatch.setattr(server.service.renderer, "prompt", broken)
    message = check_refused(call(server, path, BODIES[path]), path, 500)
    assert "secret" not in message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_an_exception_in_a_stream_ends_it_with_an_error_in_the_vendors_shape(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RecursionError("a secret")

    monkeypatch.setattr("kvfold.serve.api.tool_calls.ToolCallParser.add", broken)
    monkeypatch.setattr("kvfold.serve.api.sse.TextLines.__call__", broken)  # of texts that no parser has to see
    answer = call(server, path, {**BODIES[path], "stream": True})
    assert answer.status == 200
    assert '"the server failed; its log says why"' in answer.text
    assert "secret" not in answer.text
