"""Anthropic's Messages API, from JSON to a request: blocks, markers, and what is refused."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from kvfold.engine.sample import Sampling
from kvfold.serve.api_error import bad_request
from kvfold.serve.ask import Ask, Block, Role
from kvfold.serve.fields import Fields
from kvfold.serve.settings import Settings

TTL_S = {"5m": 300.0, "1h": 3600.0}
MAX_MARKERS = 4


@dataclass(frozen=True)
class MessagesBody:
    """A request for a message. `previous_id` is of use where `is_diagnosed`."""

    ask: Ask
    is_streamed: bool = False
    is_diagnosed: bool = False
    previous_id: str | None = None


def read_messages(data: object, settings: Settings) -> MessagesBody:
    """POST /v1/messages."""
    body = Fields(data)
    is_streamed = body.flag("stream", False)
    max_tokens = body.integer("max_tokens", None, 0, settings.limits.output_tokens)
    sampling = _sampling(body, settings)
    stop = body.texts("stop_sequences", 16)
    diagnostics = body.object("diagnostics")
    previous_id = None if diagnostics is None else diagnostics.optional_text("previous_message_id")
    if diagnostics is not None:
        diagnostics.end()
    metadata = body.object("metadata")
    if metadata is not None:
        metadata.optional_text("user_id")
        metadata.end()
    body.choice("service_tier", ("auto", "standard_only"), "auto")
    model, blocks, tool_choice = _prompt_fields(body)
    body.end()
    if max_tokens == 0 and is_streamed:
        raise bad_request("stream: a request with max_tokens 0 has nothing to stream; leave stream out")
    ask = Ask(model, blocks, max_tokens, sampling, stop, tool_choice)
    return MessagesBody(ask, is_streamed, diagnostics is not None, previous_id)


def read_count(data: object) -> Ask:
    """POST /v1/messages/count_tokens."""
    body = Fields(data)
    model, blocks, tool_choice = _prompt_fields(body)
    body.end()
    return Ask(model, blocks, 0, tool_choice=tool_choice)


def _prompt_fields(body: Fields) -> tuple[str, list[Block], str]:
    """What both take."""
    model = body.text("model")
    thinking = body.object("thinking")
    if thinking is not None:
        thinking.choice("type", ("disabled",))
        thinking.end()
    blocks = [*_tools(body), *_system(body), *_messages(body)]
    automatic = _ttl(body)
    _check_markers(blocks)
    return model, blocks if automatic is None else _mark_last(blocks, automatic), _tool_choice(body)


def _sampling(body: Fields, settings: Settings) -> Sampling:
    temperature = body.number("temperature", settings.temperature, 0.0, 2.0)
    top_p = body.number("top_p", 1.0, 1e-6, 1.0)
    return Sampling(temperature, body.integer("top_k", 0, 0, 1 << 20), top_p, secrets.randbits(63))


def _tool_choice(body: Fields) -> str:
    choice = body.object("tool_choice")
    if choice is None:
        return "auto"
    found = choice.choice("type", ("auto", "none"))
    choice.end()
    return found


# Markers


def _ttl(fields: Fields) -> float | None:
    """Of a marker in this object, if there is one."""
    marker = fields.object("cache_control")
    if marker is None:
        return None
    marker.choice("type", ("ephemeral",))
    ttl = marker.choice("ttl", TTL_S, "5m")
    marker.end()
    return TTL_S[ttl]


def _check_markers(blocks: list[Block]) -> None:
    marks = [block.ttl_s for block in blocks if block.ttl_s is not None]
    if len(marks) > MAX_MARKERS:
        raise bad_request(f"cache_control: at most {MAX_MARKERS} blocks may carry it; found {len(marks)}")
    if marks != sorted(marks, reverse=True):
        raise bad_request('cache_control: a ttl of "1h" must not come after one of "5m" (tools, system, messages)')


def _mark_last(blocks: list[Block], ttl_s: float) -> list[Block]:
    """The automatic marker, on the last block that can carry one."""
    at = next((i for i in range(len(blocks) - 1, -1, -1) if blocks[i].is_cacheable), None)
    if at is None or blocks[at].ttl_s == ttl_s:
        return blocks
    if blocks[at].ttl_s is not None:
        raise bad_request("cache_control: the last block carries a marker of another ttl; use one ttl for both")
    if sum(block.ttl_s is not None for block in blocks) == MAX_MARKERS:
        raise bad_request(f"cache_control: {MAX_MARKERS} blocks carry it already; leave one out for the automatic one")
    found = [*blocks[:at], blocks[at].marked(ttl_s), *blocks[at + 1 :]]
    _check_markers(found)
    return found


# Blocks


def _tools(body: Fields) -> list[Block]:
    found = []
    for i, item in enumerate(body.items("tools")):
        tool = Fields(item, f"tools.{i}")
        tool.choice("type", ("custom",), "custom")
        definition = {
            "name": tool.text("name"),
            "description": tool.text("description", ""),
            "parameters": tool.require("input_schema"),
        }
        found.append(Block("tool", data=definition, ttl_s=_ttl(tool)))
        tool.end()
    return found


def _system(body: Fields) -> list[Block]:
    given = body.take("system")
    if given is None:
        return []
    items = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        body.refuse("system", "a string or a list of text blocks is required")
    return [_text(Fields(item, f"system.{i}"), "system", "system", -1) for i, item in enumerate(items)]


def _messages(body: Fields) -> list[Block]:
    items = [Fields(item, f"messages.{i}") for i, item in enumerate(body.items("messages"))]
    roles = [item.choice("role", ("user", "assistant", "system")) for item in items]
    _check_roles(roles)
    found: list[Block] = []
    number = -1
    for i, item in enumerate(items):
        number += i == 0 or roles[i] != roles[i - 1]  # messages of one role in a row are one turn
        found += _content(item, roles[i], number)
        item.end()
    return found


def _check_roles(roles: list[str]) -> None:
    if not roles or roles[0] != "user":
        raise bad_request("messages: at least one message is required, and the first must be the user's")
    if roles[-1] == "assistant":
        raise bad_request("messages: the last one must not be the assistant's; replies cannot be prefilled here")
    for i, role in enumerate(roles):
        if role == "system" and (roles[i - 1] != "user" or roles[i + 1 : i + 2] not in ([], ["assistant"])):
            raise bad_request(
                f"messages.{i}: a system message follows a user's, and the assistant's or nothing comes next"
            )


def _content(message: Fields, role: str, number: int) -> list[Block]:
    content = message.require("content")
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(items, list):
        message.refuse("content", "a string or a list of blocks is required")
    return [_block(Fields(item, f"{message.path('content')}.{i}"), role, number) for i, item in enumerate(items)]


def _block(block: Fields, role: str, number: int) -> Block:
    allowed = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}[role]
    kind = str(block.take("type"))
    if kind not in allowed:
        block.refuse("type", f'"{kind[:80]}" is not supported in this role; supported: {", ".join(allowed)}')
    if kind == "tool_use":
        data = {"id": block.text("id"), "name": block.text("name"), "arguments": block.require("input")}
        return _ended(block, Block("tool_use", "assistant", message=number, data=data, ttl_s=_ttl(block)))
    if kind == "tool_result":
        data = {"id": block.text("tool_use_id"), "is_error": block.flag("is_error", False)}
        text = _result_text(block)
        return _ended(block, Block("tool_result", "tool", text, number, data, _ttl(block)))
    return _text(block, "text", {"user": "user", "assistant": "assistant", "system": "system"}[role], number)  # type: ignore[arg-type]


def _text(block: Fields, kind: Any, role: Role, number: int) -> Block:
    block.choice("type", ("text",), "text")
    text, ttl_s = block.text("text"), _ttl(block)
    if ttl_s is not None and not text:
        block.refuse("cache_control", "an empty text block cannot carry it")
    return _ended(block, Block(kind, role, text, number, ttl_s=ttl_s))


def _result_text(block: Fields) -> str:
    content = block.take("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        block.refuse("content", "a string or a list of text blocks is required")
    parts = [Fields(item, f"{block.path('content')}.{i}") for i, item in enumerate(content)]
    return "\n".join(_text(part, "text", "tool", 0).text for part in parts)


def _ended(fields: Fields, block: Block) -> Block:
    fields.end()
    return block


def arguments_text(arguments: object) -> str:
    """A call's arguments as JSON, as clients get them."""
    return json.dumps(arguments, ensure_ascii=False)
