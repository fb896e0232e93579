"""Anthropic's Messages API: writes replies as JSON or as named server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from kvfold.serve.api.anthropic import MessagesBody
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.sse import TextLines
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.tool_calls import ToolCall
from kvfold.serve.cache.diagnostics import fingerprint
from kvfold.serve.reply import Reply
from kvfold.serve.service import Service


class MessageWriter:
    """One reply as a message."""

    def __init__(self, service: Service, body: MessagesBody, reply: Reply) -> None:
        self._service, self._body, self._reply = service, body, reply
        self._id = f"msg_{reply.id}"
        self._diagnostics = self._cache_diagnostics()

    def _cache_diagnostics(self) -> Json | None:
        reply, diagnostics = self._reply, self._service.diagnostics
        num_cached = reply.usage.num_read + reply.usage.num_written
        mine = fingerprint(reply.request, reply.context.tenant, reply.plan.boundaries, num_cached)
        reason = diagnostics.reason(self._body.previous_id, mine, reply.usage.num_read)
        diagnostics.keep(self._id, mine)
        return {"cache_miss_reason": reason} if self._body.is_diagnosed else None

    def _message(self, content: list[Json]) -> Json:
        """The complete message; with empty content, that of `message_start`."""
        found: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.request.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": None if self._reply.end is None else self._reply.end.stop,
            "usage": self._usage(),
        }
        return found if self._diagnostics is None else {**found, "diagnostics": self._diagnostics}

    def _usage(self) -> Json:
        usage, num_output = self._reply.usage, self._reply.num_output
        found: Json = {
            "input_tokens": usage.num_plain,
            "cache_creation_input_tokens": usage.num_written,
            "cache_read_input_tokens": usage.num_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": usage.num_short,
                "ephemeral_1h_input_tokens": usage.num_long,
            },
            "output_tokens": num_output,
            **usage.original("original_input_tokens"),
        }
        price = self._service.settings.price
        return found if price is None else {**found, "cost_usd": price.cost(usage, num_output)}

    @property
    def _stop_reason(self) -> str | None:
        end = self._reply.end
        if end is None:
            return None
        if end.reason == "length" and self._reply.is_cut:
            return "model_context_window_exceeded"
        if end.reason == "eos":
            return "tool_use" if self._reply.has_calls else "end_turn"
        return "stop_sequence" if end.reason == "stop" else "max_tokens"

    async def whole(self) -> Json:
        return self._message([_content(part) for part in await self._reply.joined_parts()])

    async def events(self) -> AsyncIterator[Json | str]:
        """Each has its SSE name under "type"."""
        yield {"type": "message_start", "message": self._message([])}
        index, is_open, lines_of_text = 0, False, TextLines(partial(_text_delta, 0))
        async for part in self._reply.parts():
            if isinstance(part, ToolCall):
                if is_open:
                    yield {"type": "content_block_stop", "index": index}
                    index += 1
                for event in _call_events(part, index):
                    yield event
                index, is_open = index + 1, False
                self._reply.write_texts(None)
                continue
            if not is_open:
                yield _block_start(index, _content(""))
                is_open, lines_of_text = True, TextLines(partial(_text_delta, index))
                self._reply.write_texts(lines_of_text)
            yield lines_of_text(part)
        if is_open:
            yield {"type": "content_block_stop", "index": index}
        stop = None if self._reply.end is None else self._reply.end.stop
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason, "stop_sequence": stop},
            "usage": self._usage(),
        }
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Json:
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


def _call_events(call: ToolCall, index: int) -> list[Json]:
    return [
        _block_start(index, {**_content(call), "input": {}}),
        _delta(index, {"type": "input_json_delta", "partial_json": call.arguments_text}),
        {"type": "content_block_stop", "index": index},
    ]


def _content(part: str | ToolCall) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": part.arguments}


def _block_start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _text_delta(index: int, text: str) -> Json:
    return _delta(index, {"type": "text_delta", "text": text})


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}
