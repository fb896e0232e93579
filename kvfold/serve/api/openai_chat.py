"""OpenAI's chat completions and text completions APIs: parse requests, write replies as JSON or server-sent events.

The prompt of a text completion is tokenized without a chat template.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from functools import partial

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.openai import (
    OpenAIBody,
    OpenAIFields,
    Parts,
    read_conversation,
    result_block,
    text_blocks,
    with_cost,
)
from kvfold.serve.api.request import Block, ChatRequest, Role
from kvfold.serve.api.sse import TextLines
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.tool_calls import ToolCall
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

_NAME = re.compile(r"[^\s<|\\/>]{1,64}")  # OpenAI's
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"
}  # fmt: skip
DEFAULT_MAX_TOKENS = 16  # of a text completion; OpenAI's


def read_chat(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/chat/completions."""
    body = OpenAIFields(data)
    model, (is_streamed, shows_usage) = body.text("model"), body.stream()
    max_tokens = _max_tokens(body, settings.limits.output_tokens)
    seed = body.seed()
    sampling, stop = body.sampling(settings, seed=seed), body.texts("stop", 4)
    body.neutral("openai", "completions", "chat", "chat_of_routers")
    user = body.who()["user"] or ""
    planner, cache_key = body.cache_options("30m")
    blocks = [*body.tools(is_nested=True), *_messages(body.objects("messages"))]
    tool_choice, policy, ignores_eos = body.tool_choice(), body.policy(), body.flag("ignore_eos", False)
    body.end()
    request = ChatRequest(
        model,
        blocks,
        max_tokens,
        sampling,
        stop,
        tool_choice,
        policy=policy,
        user=user,
        ignores_eos=ignores_eos,
        has_seed=seed is not None,
    )
    return OpenAIBody(request, is_streamed, planner, cache_key, shows_usage)


def _max_tokens(body: OpenAIFields, most: int) -> int:
    """`max_completion_tokens`, or the deprecated `max_tokens`."""
    if body.has("max_completion_tokens") and body.has("max_tokens"):
        body.refuse("max_tokens", "max_completion_tokens is given too; leave one out")
    name, other = "max_completion_tokens", "max_tokens"
    if body.has(other):
        name, other = other, name
    body.take(other)
    return body.integer(name, most, 1, most)


def _messages(items: list[OpenAIFields]) -> list[Block]:
    names: dict[str, str] = {}  # call id -> tool name
    roles = [ROLES[item.choice("role", ROLES)] for item in items]
    return read_conversation(
        "messages", [(role, partial(_message, item, role, names)) for role, item in zip(roles, items, strict=True)]
    )


def _message(message: OpenAIFields, role: Role, names: dict[str, str], number: int) -> list[Block]:
    """`names`: of tools by the id of a call, which calls add to."""
    blocks = [_result(message, names, number)] if role == "tool" else _texts_and_calls(message, role, number)
    names.update({block.data["id"]: block.data["name"] for block in blocks if block.kind == "tool_use"})
    return blocks


def _result(message: OpenAIFields, names: dict[str, str], number: int) -> Block:
    call_id, given = message.text("tool_call_id"), message.optional_text("name")
    called = names.get(call_id)
    if given is not None and called is not None and given != called:
        message.refuse("name", f"the call is of {called}; leave the name out")
    return result_block(message.text_parts(("text",)), call_id, number)


def _texts_and_calls(message: OpenAIFields, role: Role, number: int) -> list[Block]:
    calls = [_call(call, number) for call in message.objects("tool_calls")] if role == "assistant" else []
    parts = message.text_parts(("text",)) if message.has("content") or not calls else []
    message.neutral("chat_message")
    return [*text_blocks(_named(message, parts), role, number), *calls]


def _named(message: OpenAIFields, parts: Parts) -> Parts:
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


def _call(call: OpenAIFields, number: int) -> Block:
    call.choice("type", ("function",), "function")
    function = call.required_object("function")
    data = {"id": call.text("id"), "name": function.tool_name(), "arguments": function.arguments()}
    return Block("tool_use", "assistant", message=number, data=data)


def read_completion(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/completions."""
    body = OpenAIFields(data)
    model, (is_streamed, shows_usage) = body.text("model"), body.stream()
    prompt, most = _prompt(body), settings.limits.output_tokens
    max_tokens = body.integer("max_tokens", min(DEFAULT_MAX_TOKENS, most), 1, most)
    seed = body.seed()
    sampling, stop = body.sampling(settings, seed=seed), body.texts("stop", 4)
    body.neutral("openai", "completions", "text_completion", "completion_of_routers")
    body.who()
    planner, cache_key = body.cache_options("30m")
    policy, ignores_eos = body.policy(), body.flag("ignore_eos", False)
    body.end()
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    request = ChatRequest(
        model,
        [Block("text", "user", text or "", 0)],
        max_tokens,
        sampling,
        stop,
        raw_text=text,
        raw_ids=ids,
        policy=policy,
        ignores_eos=ignores_eos,
        has_seed=seed is not None,
    )
    return OpenAIBody(request, is_streamed, planner, cache_key, shows_usage)


def _prompt(body: OpenAIFields) -> str | list[int]:
    """A text or token ids, or a list of one of them, as some clients send it."""
    found = body.require("prompt")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]
    is_ids = isinstance(found, list) and all(type(one) is int for one in found)
    if not found or not (is_ids or isinstance(found, str)):
        body.refuse(
            "prompt", "one text that is not empty, or one list of token ids, is required; send a request for each"
        )
    prompt: str | list[int] = found
    return prompt


# Replies


class CompletionWriter:
    """One reply as a text completion."""

    prefix = "cmpl"

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())

    def _completion(self, kind: str, **choice: object) -> Json:
        """With one choice, or none."""
        head = {"id": f"{self.prefix}-{self._reply.id}", "object": kind, "created": self._created}
        choices = [{"index": 0, "logprobs": None, **choice}] if choice else []
        return {**head, "model": self._reply.request.model, "choices": choices}

    def _usage(self) -> Json:
        usage, num_output = self._reply.usage, self._reply.num_output
        found: Json = {
            "prompt_tokens": usage.num_tokens,
            "completion_tokens": num_output,
            "total_tokens": usage.num_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": usage.num_read, "cache_write_tokens": usage.num_written},
            **usage.original("original_prompt_tokens"),
        }
        return {"usage": with_cost(found, self._service.settings, usage, num_output)}

    @property
    def _finish_reason(self) -> str | None:
        end = self._reply.end
        if end is None:
            return None
        if end.reason == "eos" and self._reply.has_calls:
            return "tool_calls"
        return "length" if end.reason == "length" else "stop"

    def _text(self, text: str) -> Json:
        return self._completion("text_completion", text=text, finish_reason=None)

    def _last(self, text: str) -> Json:
        """`stop_reason` is vLLM's: the stop string that ended the text."""
        reason = {"finish_reason": self._finish_reason, "stop_reason": self._reply.end and self._reply.end.stop}
        return self._completion("text_completion", text=text, **reason)

    async def whole(self) -> Json:
        text = "".join(map(str, await self._reply.joined_parts()))
        return self._last(text) | self._usage()

    async def events(self) -> AsyncIterator[Json | str]:
        lines_of_text = TextLines(self._text)
        self._reply.write_texts(lines_of_text)
        async for part in self._reply.parts():
            yield lines_of_text(str(part))
        yield self._last("")
        if self._body.shows_usage:
            yield self._completion("text_completion") | self._usage()

    def failed(self, error: ApiError) -> Json:
        return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.openai_status}}


class ChatWriter(CompletionWriter):
    """One reply as a chat completion."""

    prefix = "chatcmpl"

    async def whole(self) -> Json:
        parts = await self._reply.joined_parts()
        texts = [part for part in parts if isinstance(part, str)]
        calls = [_call_out(part) for part in parts if isinstance(part, ToolCall)]
        message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        message |= {"tool_calls": calls} if calls else {}
        found = self._completion("chat.completion", message=message, finish_reason=self._finish_reason)
        return found | self._usage()

    def _chunk(self, delta: Json, reason: str | None = None) -> Json:
        return self._completion("chat.completion.chunk", delta=delta, finish_reason=reason)

    async def events(self) -> AsyncIterator[Json | str]:
        yield self._chunk({"role": "assistant", "content": ""})
        num_calls, lines_of_text = 0, TextLines(lambda text: self._chunk({"content": text}))
        self._reply.write_texts(lines_of_text)
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                yield self._chunk({"tool_calls": [{"index": num_calls, **_call_out(part)}]})
                num_calls += 1
            else:
                yield lines_of_text(part)
        yield self._chunk({}, self._finish_reason)
        if self._body.shows_usage:
            yield self._completion("chat.completion.chunk") | self._usage()


def _call_out(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments_text}
    return {"id": f"call_{call.id}", "type": "function", "function": function}
