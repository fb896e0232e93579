"""OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from kvfold.serve.anthropic import arguments_text
from kvfold.serve.api_error import ApiError, bad_request
from kvfold.serve.ask import Ask, Block
from kvfold.serve.calls import Call
from kvfold.serve.fields import Fields
from kvfold.serve.openai import (
    Json,
    OpenAIBody,
    numbered,
    read_caching,
    read_neutral,
    read_sampling,
    read_tool_choice,
    read_tools,
    text_blocks,
    text_parts,
    with_cost,
)
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_chat(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/chat/completions."""
    body = Fields(data)
    model, is_streamed = body.text("model"), body.flag("stream", False)
    most = settings.limits.output_tokens
    named = "max_completion_tokens" if body.has("max_completion_tokens") else "max_tokens"
    max_tokens = body.integer(named, most, 1, most)
    sampling, stop = read_sampling(body, settings), body.texts("stop", 4)
    options = body.object("stream_options")
    shows_usage = options is not None and options.flag("include_usage", False)
    if options is not None:
        options.end()
    _read_fixed(body)
    read_neutral(body)
    caching = read_caching(body, ("30m",))
    blocks = [*read_tools(body, is_nested=True), *_messages(body)]
    tool_choice = read_tool_choice(body)
    body.end()
    ask = Ask(model, blocks, max_tokens, sampling, stop, tool_choice)
    return OpenAIBody(ask, caching, is_streamed, shows_usage)


def _read_fixed(body: Fields) -> None:
    """Fields of which only the default is offered."""
    body.integer("n", 1, 1, 1)
    body.number("presence_penalty", 0.0, 0.0, 0.0)
    body.number("frequency_penalty", 0.0, 0.0, 0.0)
    if body.flag("logprobs", False):
        body.refuse("logprobs", "log probabilities are not offered; leave it out")
    form = body.object("response_format")
    if form is not None:
        form.choice("type", ("text",))
        form.end()


def _messages(body: Fields) -> list[Block]:
    items = [Fields(item, f"messages.{i}") for i, item in enumerate(body.items("messages"))]
    roles = [ROLES[item.choice("role", ROLES)] for item in items]
    if not roles or roles[-1] == "assistant":
        raise bad_request("messages: at least one is required, and the last must not be the assistant's")
    found: list[Block] = []
    for item, role, number in zip(items, roles, numbered(roles), strict=True):
        found += _message(item, role, number)
        item.end()
    return found


def _message(message: Fields, role: Any, number: int) -> list[Block]:
    message.optional_text("name")
    if role == "tool":
        message.text("tool_call_id")
        joined = "\n".join(text for text, _ in text_parts(message.require("content"), message.where, ("text",)))
        return text_blocks([(joined, False)], "tool", number)
    calls = [_call(Fields(item, f"{message.where}.tool_calls"), number) for item in message.items("tool_calls")]
    content = message.take("content")
    if content is None and not calls:
        message.refuse("content", "the field is required")
    parts = [] if content is None else text_parts(content, message.where, ("text",))
    return [*text_blocks(parts, role, number), *calls]


def _call(call: Fields, number: int) -> Block:
    call.choice("type", ("function",), "function")
    function = call.object("function") or Fields(None, call.path("function"))
    data = {"id": call.text("id"), "name": function.text("name"), "arguments": parse_arguments(function)}
    function.end()
    call.end()
    return Block("tool_use", "assistant", message=number, data=data)


def parse_arguments(fields: Fields) -> Json:
    """The JSON text under "arguments"."""
    try:
        found = json.loads(fields.text("arguments") or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        fields.refuse("arguments", "the text of a JSON object is required")
    return found


def usage(service: Service, reply: Reply) -> Json:
    """Of chat and of text completions."""
    paid, num_output = reply.bill, reply.num_output
    found: Json = {
        "prompt_tokens": paid.num_tokens,
        "completion_tokens": num_output,
        "total_tokens": paid.num_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": paid.num_read, "cache_write_tokens": paid.num_written},
    }
    return with_cost(found, service.settings, paid, num_output)


def finish_reason(reply: Reply) -> str | None:
    if reply.end is None:
        return None
    if reply.end.reason == "eos" and reply.has_calls:
        return "tool_calls"
    return "length" if reply.end.reason == "length" else "stop"


class ChatWriter:
    """One reply as a chat completion."""

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())

    def _head(self, kind: str) -> Json:
        model = self._reply.ask.model
        return {"id": f"chatcmpl-{self._reply.id}", "object": kind, "created": self._created, "model": model}

    async def whole(self) -> Json:
        texts, calls = [], []
        async for part in self._reply.parts():
            if isinstance(part, Call):
                calls.append(_call_out(part))
            else:
                texts.append(part)
        message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(self._reply)}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(self._service, self._reply),
        }

    def _chunk(self, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    async def events(self) -> AsyncIterator[Json]:
        yield self._chunk({"role": "assistant", "content": ""})
        num_calls = 0
        try:
            async for part in self._reply.parts():
                if isinstance(part, Call):
                    yield self._chunk({"tool_calls": [{"index": num_calls, **_call_out(part)}]})
                    num_calls += 1
                else:
                    yield self._chunk({"content": part})
        except ApiError as error:
            yield {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
            return
        yield self._chunk({}, finish_reason(self._reply))
        if self._body.shows_usage:
            yield {
                **self._head("chat.completion.chunk"),
                "choices": [],
                "usage": usage(self._service, self._reply),
            }


def _call_out(call: Call) -> Json:
    function = {"name": call.name, "arguments": arguments_text(call.arguments)}
    return {"id": f"call_{call.id}", "type": "function", "function": function}
