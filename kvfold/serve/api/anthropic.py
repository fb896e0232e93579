"""Anthropic's Messages API: parses and validates requests (content blocks, `cache_control` markers, tools)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvfold.serve.api.errors import bad_request
from kvfold.serve.api.request import Block, ChatRequest, Kind, Role, check_calls
from kvfold.serve.api.validation import Fields, check_names
from kvfold.serve.cache.breakpoints import anthropic_plan
from kvfold.serve.reply import Body
from kvfold.serve.settings import Settings

TTL_S = {"5m": 300.0, "1h": 3600.0}
MAX_MARKERS = 4
VERSIONS = ("2023-01-01", "2023-06-01", "2026-10-21")  # of the API; SDKs before 2 send the second, later ones the third


@dataclass(frozen=True)
class MessagesBody(Body):
    """`previous_id`: `diagnostics.previous_message_id`, used where `is_diagnosed`."""

    is_diagnosed: bool = False
    previous_id: str | None = None


def read_messages(data: object, settings: Settings) -> MessagesBody:
    """POST /v1/messages."""
    body = Fields(data)
    is_streamed = body.flag("stream", False)
    max_tokens = body.integer("max_tokens", None, 0, settings.limits.output_tokens)
    sampling = body.sampling(settings, body.integer("top_k", 0, 0, 1 << 20))
    stop = body.texts("stop_sequences", 16)
    diagnostics = body.object("diagnostics")
    previous_id = None if diagnostics is None else diagnostics.optional_text("previous_message_id")
    metadata = body.object("metadata")
    user = "" if metadata is None else metadata.optional_text("user_id") or ""
    body.neutral("messages_reply")
    model, blocks, tool_choice = _prompt_fields(body)
    policy = body.policy()
    body.end()
    if max_tokens == 0 and is_streamed:
        raise bad_request("stream: a request with max_tokens 0 has nothing to stream; leave stream out")
    request = ChatRequest(
        model, blocks, max_tokens, sampling, stop, tool_choice, policy=policy, user=user, user_field="metadata.user_id"
    )
    return MessagesBody(request, is_streamed, anthropic_plan, "", diagnostics is not None, previous_id)


def check_version(headers: Mapping[str, str]) -> None:
    """A missing version means the latest."""
    found = headers.get("anthropic-version")
    if found is not None and found not in VERSIONS:
        message = f"anthropic-version: one of {', '.join(VERSIONS)} is required"
        raise bad_request(f'{message}, not "{found[:80]}"', logged=message)


def read_count(data: object) -> ChatRequest:
    """POST /v1/messages/count_tokens."""
    body = Fields(data)
    model, blocks, tool_choice = _prompt_fields(body)
    body.end()
    return ChatRequest(model, blocks, 0, tool_choice=tool_choice)


def _prompt_fields(body: Fields) -> tuple[str, list[Block], str]:
    """Fields of both endpoints."""
    model = body.text("model")
    body.neutral("messages")
    blocks = [*_tools(body), *_system(body), *_messages(body)]
    automatic = _ttl(body)
    check_calls(blocks, "messages")
    _check_markers(blocks)
    return model, blocks if automatic is None else _mark_last(blocks, automatic), _tool_choice(body)


def _tool_choice(body: Fields) -> str:
    choice = body.object("tool_choice")
    if choice is None:
        return "auto"
    found = choice.choice("type", ("auto", "none"))
    choice.neutral("messages_tool_choice")
    return found


# Markers


def _ttl(fields: Fields) -> float | None:
    """Time to live of this object's cache marker, if it has one."""
    marker = fields.object("cache_control")
    if marker is None:
        return None
    marker.choice("type", ("ephemeral",))
    return TTL_S[marker.choice("ttl", TTL_S, "5m")]


def _check_markers(blocks: list[Block]) -> None:
    marks = [block.ttl_s for block in blocks if block.ttl_s is not None]
    if len(marks) > MAX_MARKERS:
        raise bad_request(f"cache_control: at most {MAX_MARKERS} blocks may carry it; found {len(marks)}")
    if marks != sorted(marks, reverse=True):
        raise bad_request('cache_control: a ttl of "1h" must not come after one of "5m" (tools, system, messages)')


def _mark_last(blocks: list[Block], ttl_s: float) -> list[Block]:
    """Put the top-level (automatic) marker on the last block; there is one, since no message is empty."""
    *before, last = blocks
    if last.ttl_s == ttl_s:
        return blocks
    if last.ttl_s is not None:
        raise bad_request("cache_control: the last block carries a marker of another ttl; use one ttl for both")
    if sum(block.ttl_s is not None for block in blocks) == MAX_MARKERS:
        raise bad_request(f"cache_control: {MAX_MARKERS} blocks carry it already; leave one out for the automatic one")
    found = [*before, replace(last, ttl_s=ttl_s)]
    _check_markers(found)
    return found


# Blocks


def _tools(body: Fields) -> list[Block]:
    tools, found = body.objects("tools"), []
    for tool in tools:
        tool.choice("type", ("custom",), "custom")
        tool.neutral("messages_tool")
        found.append(Block("tool", data=tool.definition("input_schema"), ttl_s=_ttl(tool)))
    check_names(tools, [block.data["name"] for block in found])
    return found


def _system(body: Fields) -> list[Block]:
    given = body.take("system")
    if given in (None, ""):
        return []
    items = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        body.refuse("system", "a string or a list of text blocks is required")
    return [_text(block, "system", "system", -1) for block in body.each("system", items)]


def _messages(body: Fields) -> list[Block]:
    items = body.objects("messages")
    roles: list[Any] = [item.choice("role", ("user", "assistant", "system")) for item in items]
    _check_roles(roles)
    found: list[Block] = []
    number = -1
    for i, item in enumerate(items):
        number += i == 0 or roles[i] != roles[i - 1]  # consecutive messages of one role are one message
        found += _content(item, roles[i], number)
    return found


def _check_roles(roles: list[str]) -> None:
    if roles[:1] == ["system"]:
        raise bad_request("messages.0: the first must be the user's; put the system prompt into the field system")
    if not roles or roles[0] != "user":
        raise bad_request("messages: at least one message is required, and the first must be the user's")
    if roles[-1] == "assistant":
        raise bad_request("messages: the last one must not be the assistant's; replies cannot be prefilled here")
    for i, role in enumerate(roles):
        if role == "system" and (roles[i - 1] != "user" or roles[i + 1 : i + 2] not in ([], ["assistant"])):
            order = "a system message follows a user's, and the assistant's or nothing comes next"
            raise bad_request(f"messages.{i}: {order}; a system prompt goes into the field system")


def _content(message: Fields, role: Role, number: int) -> list[Block]:
    content = message.require("content")
    if content == "":
        message.refuse("content", "a text that is not empty is required")
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(items, list):
        message.refuse("content", "a string or a list of blocks is required")
    if not items:
        message.refuse("content", "at least one block is required")
    return [_block(block, role, number) for block in message.each("content", items)]


def _block(block: Fields, role: Role, number: int) -> Block:
    more = {"user": ("tool_result",), "assistant": ("tool_use",)}
    kind = block.choice("type", ("text", *more.get(role, ())))
    if kind == "tool_use":
        data = {"id": block.text("id"), "name": block.tool_name(), "arguments": block.data("input")}
        block.neutral("messages_tool_use")
        return Block("tool_use", "assistant", message=number, data=data, ttl_s=_ttl(block))
    if kind == "tool_result":
        data = {"id": block.text("tool_use_id")}
        text, ttl_s = _result(block)
        return Block("tool_result", "tool", text, number, data, ttl_s)
    return _text(block, "text", role, number)


def _text(block: Fields, kind: Kind, role: Role, number: int) -> Block:
    block.choice("type", ("text",), "text")
    text, ttl_s = block.text("text"), _ttl(block)
    if not text:
        block.refuse("text", "a text that is not empty is required")
    block.neutral("messages_text")
    return Block(kind, role, text, number, ttl_s=ttl_s)


def _result(block: Fields) -> tuple[str, float | None]:
    """Text of a tool result, and its marker's time to live: one in the content counts for the block's end, since a run
    of results has one boundary. Chat templates have no error flag, so `Error: ` is put before an error's text."""
    content, ttl_s, is_error = block.take("content"), _ttl(block), block.flag("is_error", False)
    if content is not None and not isinstance(content, str | list):
        block.refuse("content", "a string or a list of text blocks is required")
    items = content if isinstance(content, list) else [{"text": content}] if content else []
    parts = [_text(part, "text", "tool", 0) for part in block.each("content", items)]
    marks = [mark for mark in (*(part.ttl_s for part in parts), ttl_s) if mark is not None]
    if len(marks) > 1:
        block.refuse("cache_control", "a result and its content may carry one; all mark the result's end")
    if is_error and not parts:
        block.refuse("content", "an error has a text; say in it what went wrong")
    text = "\n".join(part.text for part in parts)
    return f"Error: {text}" if is_error else text, marks[0] if marks else None
