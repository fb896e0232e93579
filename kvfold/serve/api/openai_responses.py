"""OpenAI's Responses API, stateless: parses requests, writes replies as JSON or named server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from kvfold.serve.api.anthropic import arguments_text
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.openai import (
    NEUTRAL,
    OpenAIBody,
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
from kvfold.serve.api.openai_chat import ROLES, parse_arguments
from kvfold.serve.api.request import Block, ChatRequest, check_calls
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.tool_calls import ToolCall
from kvfold.serve.api.validation import Fields, Neutral, Only, tool_name
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

_PARTS = ("input_text", "output_text")
_STATES = ("in_progress", "completed", "incomplete")
_STEERED = "how much the model thinks is not steered here"
PROMPT_NEUTRAL: dict[str, Neutral] = {
    "text": {
        "format": {"type": Only("replies are text and not held to a format here", ("text",))},
        "verbosity": Only("how much the model writes is not steered here", ("medium",)),
    },
    "reasoning": {
        "effort": Only(_STEERED, ("none",)),
        "summary": Only("there is no reasoning to sum up"),
        "generate_summary": Only("there is no reasoning to sum up"),
        "context": Only(_STEERED, ("auto",)),
        "mode": Only(_STEERED, ("standard",)),
    },
    "truncation": Only("prompts that are too long are refused, not cut", ("disabled",)),
}
RESPONSE_NEUTRAL: dict[str, Neutral] = {
    **NEUTRAL,
    "background": Only("a reply is written while its client waits", (False,)),
    "include": Only("replies have nothing more to include", ([], ["reasoning.encrypted_content"])),
    "top_logprobs": Only("log probabilities are not supported", (0,)),
}
_NEUTRAL_CALL: dict[str, Neutral] = {
    "caller": {"type": Only("tools are called by the model alone", ("direct",))},
    "async": Only("calls are not asynchronous here", (False,)),
}


def read_response(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/responses."""
    body = Fields(data)
    (is_streamed, shows_usage), most = read_stream(body), settings.limits.output_tokens
    if shows_usage:
        body.refuse("stream_options.include_usage", "responses always tell their usage; leave it out")
    limit = body.optional_integer("max_output_tokens", 1, most)
    sampling = read_sampling(body, settings)
    body.neutral(RESPONSE_NEUTRAL)
    echo = {"max_output_tokens": limit, "instructions": body.peek("instructions"), **read_who(body)}
    model, blocks, tool_choice = _read_prompt(body)
    cache_options = read_cache_options(body, ("30m", "12h"))
    body.end()
    request = ChatRequest(model, blocks, most if limit is None else limit, sampling, (), tool_choice)
    return OpenAIBody(request, cache_options, is_streamed, echo={**echo, "prompt_cache_key": cache_options.key or None})


def read_input_tokens(data: object) -> ChatRequest:
    """POST /v1/responses/input_tokens."""
    body = Fields(data)
    model, blocks, tool_choice = _read_prompt(body)
    body.end()
    return ChatRequest(model, blocks, 0, tool_choice=tool_choice)


def _read_prompt(body: Fields) -> tuple[str, list[Block], str]:
    model, instructions = body.text("model"), body.optional_text("instructions")
    body.neutral(PROMPT_NEUTRAL)
    given = body.require("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        body.refuse("input", "a string or a list of items is required")
    fields = [Fields(item, f"input.{i}") for i, item in enumerate(items)]
    blocks = read_tools(body, is_nested=False)
    if instructions:
        blocks.append(Block("system", "system", instructions))
    return model, [*blocks, *_items(fields)], read_tool_choice(body)


def _items(items: list[Fields]) -> list[Block]:
    kinds = [item.choice("type", ("message", "function_call", "function_call_output"), "message") for item in items]
    roles = [_role(item, kind) for item, kind in zip(items, kinds, strict=True)]
    if roles[-1] == "assistant":
        raise bad_request("input: the last item must not be the assistant's")
    found: list[Block] = []
    for item, kind, role, number in zip(items, kinds, roles, numbered(roles), strict=True):
        item.optional_text("id")
        item.choice("status", _STATES, "completed")
        found += _item(item, kind, role, number)
        item.end()
    check_calls(found, "input")
    return without_empty(found)


def _role(item: Fields, kind: str) -> str:
    if kind == "message":
        return ROLES[item.choice("role", [role for role in ROLES if role != "tool"])]
    return "assistant" if kind == "function_call" else "tool"


def _item(item: Fields, kind: str, role: Any, number: int) -> list[Block]:
    if kind == "message":
        return text_blocks(text_parts(item, _PARTS), role, number)
    call_id = item.text("call_id")
    item.neutral(_NEUTRAL_CALL)
    if kind == "function_call":
        data = {"id": call_id, "name": tool_name(item), "arguments": parse_arguments(item)}
        return [Block("tool_use", "assistant", message=number, data=data)]
    return [result_block(text_parts(item, ("input_text",), "output"), call_id, number)]


class ResponseWriter:
    """One reply as a response; texts are message items, tool calls are function_call items."""

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())
        self._numbers = count()
        self._output: list[Json] = []

    def _response(self, status: str) -> Json:
        request, is_done = self._reply.request, self._reply.end is not None
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._reply.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": request.model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": details,
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "tool_choice": request.tool_choice,
            "tools": [{"type": "function", "strict": False, **block.data} for block in request.tools],
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "store": False,
            **self._body.echo,
            "usage": self._usage() if is_done else None,
        }

    def _usage(self) -> Json:
        usage, num_output = self._reply.usage, self._reply.num_output
        found: Json = {
            "input_tokens": usage.num_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_read, "cache_write_tokens": usage.num_written},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_tokens + num_output,
        }
        return with_cost(found, self._service.settings, usage, num_output)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.end is not None and self._reply.end.reason == "length" else "completed"

    async def whole(self) -> Json:
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                self._output.append(_call_item(part, "completed"))
            elif self._output and self._output[-1]["type"] == "message":
                self._output[-1]["content"][0]["text"] += part
            else:
                self._output.append(self._message(part, "completed"))
        return self._response(self._status)

    def _message(self, text: str | None, status: str) -> Json:
        content = [] if text is None else [_text_part(text)]
        item_id = f"msg_{self._reply.id}_{len(self._output)}"
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    # Streaming

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **more}

    async def events(self) -> AsyncIterator[Json]:
        """Each has its SSE name under "type", and a sequence number."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))
        text: str | None = None  # of the message item being streamed
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                for event in (*self._close(text), *self._called(part)):
                    yield event
                text = None
                continue
            if text is None:
                for event in self._open():
                    yield event
            yield self._text_event("delta", delta=part)
            text = (text or "") + part
        for event in self._close(text):
            yield event
        yield self._event(self._status, response=self._response(self._status))

    def failed(self, error: ApiError) -> Json:
        failure = {"code": "server_error", "message": str(error)}
        return self._event("failed", response={**self._response("failed"), "error": failure})

    @property
    def _where(self) -> Json:
        index = len(self._output)
        return {"item_id": f"msg_{self._reply.id}_{index}", "output_index": index, "content_index": 0}

    def _text_event(self, kind: str, **more: Any) -> Json:
        return self._event(f"output_text.{kind}", **self._where, logprobs=[], **more)

    def _open(self) -> list[Json]:
        index, item = len(self._output), self._message(None, "in_progress")
        return [
            self._event("output_item.added", output_index=index, item=item),
            self._event("content_part.added", **self._where, part=_text_part("")),
        ]

    def _close(self, text: str | None) -> list[Json]:
        """Add the message item being streamed, if any, to the output."""
        if text is None:
            return []
        index, item = len(self._output), self._message(text, "completed")
        found = [
            self._text_event("done", text=text),
            self._event("content_part.done", **self._where, part=_text_part(text)),
            self._event("output_item.done", output_index=index, item=item),
        ]
        self._output.append(item)
        return found

    def _called(self, call: ToolCall) -> list[Json]:
        index, item = len(self._output), _call_item(call, "completed")
        where = {"item_id": item["id"], "output_index": index}
        started = {**item, "arguments": "", "status": "in_progress"}
        self._output.append(item)
        return [
            self._event("output_item.added", output_index=index, item=started),
            self._event("function_call_arguments.delta", **where, delta=item["arguments"]),
            self._event("function_call_arguments.done", **where, name=call.name, arguments=item["arguments"]),
            self._event("output_item.done", output_index=index, item=item),
        ]


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall, status: str) -> Json:
    arguments = arguments_text(call.arguments)
    names = {"id": f"fc_{call.id}", "call_id": f"call_{call.id}", "name": call.name}
    return {"type": "function_call", **names, "arguments": arguments, "status": status}
