"""OpenAI's Responses API, stateless: parses requests, writes replies as JSON or named server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import Any

from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.openai import (
    OpenAIBody,
    OpenAIFields,
    Turn,
    read_conversation,
    result_block,
    text_blocks,
    with_cost,
)
from kvfold.serve.api.openai_chat import ROLES
from kvfold.serve.api.request import Block, ChatRequest, Role
from kvfold.serve.api.sse import lines_of
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.tool_calls import ToolCall
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

_PARTS = ("input_text", "output_text")
_STATES = ("in_progress", "completed", "incomplete")


def read_response(data: object, settings: Settings) -> OpenAIBody:
    """POST /v1/responses."""
    body = OpenAIFields(data)
    (is_streamed, shows_usage), most = body.stream(), settings.limits.output_tokens
    if shows_usage:
        body.refuse("stream_options.include_usage", "responses always tell their usage; leave it out")
    limit = body.optional_integer("max_output_tokens", 1, most)
    seed = body.seed()
    sampling = body.sampling(settings, seed=seed)
    body.neutral("openai", "response", "response_of_routers")
    echo = {"max_output_tokens": limit, "instructions": body.peek("instructions"), **body.who()}
    model, blocks, tool_choice = _read_prompt(body)
    planner, cache_key = body.cache_options("30m", "12h")
    policy = body.policy()
    body.end()
    request = ChatRequest(
        model,
        blocks,
        most if limit is None else limit,
        sampling,
        (),
        tool_choice,
        policy=policy,
        user=echo["user"] or "",
        has_seed=seed is not None,
    )
    echo["prompt_cache_key"] = cache_key or None
    return OpenAIBody(request, is_streamed, planner, cache_key, echo=echo)


def read_input_tokens(data: object) -> ChatRequest:
    """POST /v1/responses/input_tokens."""
    body = OpenAIFields(data)
    model, blocks, tool_choice = _read_prompt(body)
    body.end()
    return ChatRequest(model, blocks, 0, tool_choice=tool_choice)


def _read_prompt(body: OpenAIFields) -> tuple[str, list[Block], str]:
    model, instructions = body.text("model"), body.optional_text("instructions")
    body.neutral("response_prompt")
    given = body.require("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        body.refuse("input", "a string or a list of items is required")
    turns = list(map(_turn, body.each("input", items)))
    blocks = body.tools(is_nested=False)
    if instructions:
        blocks.append(Block("system", "system", instructions))
    return model, [*blocks, *read_conversation("input", turns)], body.tool_choice()


def _turn(item: OpenAIFields) -> Turn:
    kind = item.choice("type", ("message", "function_call", "function_call_output"), "message")
    role: Role = "assistant" if kind == "function_call" else "tool"
    if kind == "message":
        role = ROLES[item.choice("role", [role for role in ROLES if role != "tool"])]
    return role, partial(_blocks, item, kind, role)


def _blocks(item: OpenAIFields, kind: str, role: Role, number: int) -> list[Block]:
    item.optional_text("id")
    item.choice("status", _STATES, "completed")
    return text_blocks(item.text_parts(_PARTS), role, number) if kind == "message" else [_call(item, kind, number)]


def _call(item: OpenAIFields, kind: str, number: int) -> Block:
    """A call, or its output."""
    call_id = item.text("call_id")
    item.neutral("response_call")
    if kind == "function_call_output":
        return result_block(item.text_parts(("input_text",), "output"), call_id, number)
    data = {"id": call_id, "name": item.tool_name(), "arguments": item.arguments()}
    return Block("tool_use", "assistant", message=number, data=data)


class ResponseWriter:
    """One reply as a response; texts are message items, tool calls are function_call items."""

    def __init__(self, service: Service, body: OpenAIBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._created = int(time.time())
        self._numbers = count()
        self._output: list[Json] = []
        self._text: str | None = None  # of the message item being streamed

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
            **usage.original("original_input_tokens"),
        }
        return with_cost(found, self._service.settings, usage, num_output)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.end is not None and self._reply.end.reason == "length" else "completed"

    async def whole(self) -> Json:
        for part in await self._reply.joined_parts():
            item = _call_item(part) if isinstance(part, ToolCall) else self._message(part, "completed")
            self._output.append(item)
        return self._response(self._status)

    def _message(self, text: str | None, status: str) -> Json:
        content = [] if text is None else [_text_part(text)]
        item_id = f"msg_{self._reply.id}_{len(self._output)}"
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    # Streaming

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **more}

    async def events(self) -> AsyncIterator[Json | str]:
        """Each has its SSE name under "type", and a sequence number."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                self._reply.write_texts(None)
                for event in (*self._close(), *self._called(part)):
                    yield event
                continue
            if self._text is None:
                for event in self._open():
                    yield event
                self._reply.write_texts(self._line)
            yield self._line(part)
        for event in self._close():
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

    def _line(self, text: str) -> str:
        self._text = (self._text or "") + text
        return lines_of(self._text_event("delta", delta=text))

    def _open(self) -> list[Json]:
        index, item = len(self._output), self._message(None, "in_progress")
        return [
            self._event("output_item.added", output_index=index, item=item),
            self._event("content_part.added", **self._where, part=_text_part("")),
        ]

    def _close(self) -> list[Json]:
        """Add the message item being streamed, if any, to the output."""
        text, self._text = self._text, None
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
        index, item = len(self._output), _call_item(call)
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


def _call_item(call: ToolCall) -> Json:
    names = {"id": f"fc_{call.id}", "call_id": f"call_{call.id}", "name": call.name}
    return {"type": "function_call", **names, "arguments": call.arguments_text, "status": "completed"}
