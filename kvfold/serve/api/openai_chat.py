"""OpenAI's chat completions API: parses requests, writes replies as JSON or server-sent events."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvfold.serve.api.anthropic import arguments_text
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.openai import (
    LOGIT_NEUTRAL,
    NEUTRAL,
    OpenAIBody,
    Parts,
    numbered,
    read_cache_options,
    read_sampling,
    read_stream,
    read_tool_choice,
    read_tools,
    read_who,
    result_block,
    text_blocks,
    text_parts,
    with_cost,
    without_empty,
)
from kvfold.serve.api.request import Block, ChatRequest, check_calls
from kvfold.serve.api.strict_json import InvalidJson, Json, parse_json
from kvfold.serve.api.tool_calls import ToolCall
from kvfold.serve.api.validation import Fields, Neutral, Only, tool_name
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

CHAT_NEUTRAL: dict[str, Neutral] = {
    **NEUTRAL,
    **LOGIT_NEUTRAL,
    "logprobs": Only("log probabilities are not supported", (False,)),
    "top_logprobs": Only("log probabilities are not supported", (0,)),
    "response_format": {"type": Only("replies are text and not held to a format here", ("text",))},
    "modalities": Only("replies are text", (["text"],)),
    "reasoning_effort": Only("how much the model thinks is not steered here", ("none",)),
    "verbosity": Only("how much the model writes is not steered here", ("medium",)),
}
_NEUTRAL_MESSAGE: dict[str, Neutral] = {"annotations": Only("annotations are not supported", ([],))}
_NAME = re.compile(r"[^\s<|\\/>]{1,64}")  # OpenAI's
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_chat(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/chat/completions."""
    body = Fields(data)
    model, (is_streamed, shows_usage) = body.text("model"), read_stream(body)
    max_tokens = _max_tokens(body, settings.limits.output_tokens)
    sampling, stop = read_sampling(body, settings), body.texts("stop", 4)
    body.neutral(CHAT_NEUTRAL)
    read_who(body)
    cache_options = read_cache_options(body, ("30m",))
    blocks = [*read_tools(body, is_nested=True), *_messages(body)]
    tool_choice = read_tool_choice(body)
    body.end()
    request = ChatRequest(model, blocks, max_tokens, sampling, stop, tool_choice)
    return OpenAIBody(request, cache_options, is_streamed, shows_usage)


def _max_tokens(body: Fields, most: int) -> int:
    """`max_completion_tokens`, or the deprecated `max_tokens`."""
    if body.has("max_completion_tokens") and body.has("max_tokens"):
        body.refuse("max_tokens", "max_completion_tokens is given too; leave one out")
    name, other = "max_completion_tokens", "max_tokens"
    if body.has(other):
        name, other = other, name
    body.take(other)
    return body.integer(name, most, 1, most)


def _messages(body: Fields) -> list[Block]:
    items = [Fields(item, f"messages.{i}") for i, item in enumerate(body.items("messages"))]
    roles = [ROLES[item.choice("role", ROLES)] for item in items]
    if not roles or roles[-1] == "assistant":
        raise bad_request("messages: at least one is required, and the last must not be the assistant's")
    found: list[Block] = []
    names: dict[str, str] = {}  # call id -> tool name
    for item, role, number in zip(items, roles, numbered(roles), strict=True):
        blocks = [_result(item, names, number)] if role == "tool" else _message(item, role, number)
        names |= {block.data["id"]: block.data["name"] for block in blocks if block.kind == "tool_use"}
        found += blocks
        item.end()
    check_calls(found, "messages")
    return without_empty(found)


def _result(message: Fields, names: Mapping[str, str], number: int) -> Block:
    call_id, given = message.text("tool_call_id"), message.optional_text("name")
    called = names.get(call_id)
    if given is not None and called is not None and given != called:
        message.refuse("name", f"the call is of {called}; leave the name out")
    return result_block(text_parts(message, ("text",)), call_id, number)


def _message(message: Fields, role: Any, number: int) -> list[Block]:
    items = message.items("tool_calls") if role == "assistant" else []
    calls = [_call(Fields(item, f"{message.where}.tool_calls.{i}"), number) for i, item in enumerate(items)]
    parts = text_parts(message, ("text",)) if message.has("content") or not calls else []
    message.neutral(_NEUTRAL_MESSAGE)
    return [*text_blocks(_named(message, parts), role, number), *calls]


def _named(message: Fields, parts: Parts) -> Parts:
    """A participant's name is put before the text, since chat templates have no field for it."""
    name = message.optional_text("name")
    if name is None:
        return parts
    if not _NAME.fullmatch(name):
        message.refuse("name", "1 to 64 characters without white space, <, |, >, / and \\ are required")
    if not parts:
        message.refuse("name", "a name stands before a text, and the message has none; leave it out")
    (text, is_marked), *rest = parts
    return [(f"{name}: {text}", is_marked), *rest]


def _call(call: Fields, number: int) -> Block:
    call.choice("type", ("function",), "function")
    function = call.object("function") or Fields(None, call.path("function"))
    data = {"id": call.text("id"), "name": tool_name(function), "arguments": parse_arguments(function)}
    function.end()
    call.end()
    return Block("tool_use", "assistant", message=number, data=data)


def parse_arguments(fields: Fields) -> Json:
    """The JSON text under "arguments"."""
    try:
        found = parse_json(fields.text("arguments") or "{}")
    except InvalidJson:
        found = None
    if not isinstance(found, dict):
        fields.refuse("arguments", "the text of a JSON object is required")
    return found


def usage_json(service: Service, reply: Reply) -> Json:
    """`usage` of chat and text completions."""
    usage, num_output = reply.usage, reply.num_output
    found: Json = {
        "prompt_tokens": usage.num_tokens,
        "completion_tokens": num_output,
        "total_tokens": usage.num_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_read, "cache_write_tokens": usage.num_written},
    }
    return with_cost(found, service.settings, usage, num_output)


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
        model = self._reply.request.model
        return {"id": f"chatcmpl-{self._reply.id}", "object": kind, "created": self._created, "model": model}

    async def whole(self) -> Json:
        texts, calls = [], []
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                calls.append(_call_out(part))
            else:
                texts.append(part)
        message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(self._reply)}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_json(self._service, self._reply),
        }

    def _chunk(self, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    async def events(self) -> AsyncIterator[Json]:
        yield self._chunk({"role": "assistant", "content": ""})
        num_calls = 0
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                yield self._chunk({"tool_calls": [{"index": num_calls, **_call_out(part)}]})
                num_calls += 1
            else:
                yield self._chunk({"content": part})
        yield self._chunk({}, finish_reason(self._reply))
        if self._body.shows_usage:
            yield {
                **self._head("chat.completion.chunk"),
                "choices": [],
                "usage": usage_json(self._service, self._reply),
            }

    def failed(self, error: ApiError) -> Json:
        return failed_event(error)


def failed_event(error: ApiError) -> Json:
    """Error event of chat and text completions."""
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}


def _call_out(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": arguments_text(call.arguments)}
    return {"id": f"call_{call.id}", "type": "function", "function": function}
