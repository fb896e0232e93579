"""What OpenAI's endpoints share: sampling, tools, the prompt cache's options, usage."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvfold.engine.sample import Sampling
from kvfold.serve.ask import Ask, Block, Role
from kvfold.serve.bill import WRITE_SHORT, Bill
from kvfold.serve.fields import Fields
from kvfold.serve.plan import Place, Plan, openai_plan
from kvfold.serve.settings import Settings

Json = dict[str, Any]
TTL_S = {"30m": 1800.0, "12h": 43200.0}


@dataclass(frozen=True)
class Caching:
    """`key` separates prompts that would otherwise share a cache."""

    is_implicit: bool = True
    ttl_s: float = TTL_S["30m"]
    key: str = ""

    def plan(self, places: Sequence[Place], min_tokens: int) -> Plan:
        return openai_plan(places, min_tokens, self.ttl_s, is_implicit=self.is_implicit)


@dataclass(frozen=True)
class OpenAIBody:
    """A request; `caching` None caches nothing. `shows_usage`: in a stream, at its end."""

    ask: Ask
    caching: Caching | None
    is_streamed: bool = False
    shows_usage: bool = False


def read_sampling(body: Fields, settings: Settings) -> Sampling:
    temperature = body.number("temperature", settings.temperature, 0.0, 2.0)
    top_p = body.number("top_p", 1.0, 1e-6, 1.0)
    seed = body.integer("seed", None, -(1 << 63), (1 << 63) - 1) if body.has("seed") else secrets.randbits(63)
    return Sampling(temperature, 0, top_p, seed & ((1 << 63) - 1))


def read_caching(body: Fields, ttls: Iterable[str]) -> Caching:
    key = body.text("prompt_cache_key", "")
    options = body.object("prompt_cache_options")
    if options is None:
        return Caching(key=key)
    mode = options.choice("mode", ("implicit", "explicit"), "implicit")
    ttl = options.choice("ttl", ttls, "30m")
    options.end()
    return Caching(mode == "implicit", TTL_S[ttl], key)


def read_neutral(body: Fields) -> None:
    """Fields that change nothing at the values that are taken; any other value is refused."""
    body.choice("service_tier", ("auto", "default"), "auto")
    body.optional_text("user")
    body.optional_text("safety_identifier")
    if body.flag("store", False):
        body.refuse("store", "this server keeps no replies; leave it out")


def read_tools(body: Fields, *, is_nested: bool) -> list[Block]:
    """Functions; chat completions nest their definition."""
    found = []
    for i, item in enumerate(body.items("tools")):
        tool = Fields(item, f"tools.{i}")
        tool.choice("type", ("function",))
        inner = (tool.object("function") if is_nested else tool) or Fields(None, f"tools.{i}.function")
        definition = {
            "name": inner.text("name"),
            "description": inner.text("description", ""),
            "parameters": inner.take("parameters") or {},
        }
        if inner.flag("strict", False):
            inner.refuse("strict", "replies are not held to a schema here; leave it out")
        inner.end()
        tool.end()
        found.append(Block("tool", data=definition))
    return found


def read_tool_choice(body: Fields) -> str:
    found = body.choice("tool_choice", ("auto", "none"), "auto")
    if not body.flag("parallel_tool_calls", True):
        body.refuse("parallel_tool_calls", "the number of calls is the model's; leave it out")
    return found


def text_parts(content: object, where: str, kinds: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Texts, and whether an explicit breakpoint stands on each."""
    if isinstance(content, str):
        return [(content, False)]
    if not isinstance(content, list):
        raise Fields({}, where).refuse("content", "a string or a list of text parts is required")
    found = []
    for i, item in enumerate(content):
        part = Fields(item, f"{where}.content.{i}")
        part.choice("type", kinds)
        text, breakpoint_ = part.text("text"), part.object("prompt_cache_breakpoint")
        if breakpoint_ is not None:
            breakpoint_.choice("mode", ("explicit",))
            breakpoint_.end()
        for name in ("annotations", "logprobs"):  # of a reply that is sent back
            part.items(name)
        part.end()
        found.append((text, breakpoint_ is not None))
    return found


def text_blocks(parts: list[tuple[str, bool]], role: Role, number: int) -> list[Block]:
    kind: Any = "system" if role == "system" and number < 0 else "tool_result" if role == "tool" else "text"
    return [Block(kind, role, text, number, ttl_s=TTL_S["30m"] if marked else None) for text, marked in parts]


def numbered(roles: Sequence[str]) -> list[int]:
    """Of each message its number: leading system messages are before 0, and a role in a row is one message."""
    found: list[int] = []
    number, before = -1, ""
    for role in roles:
        is_leading = role == "system" and number < 0
        if not is_leading and (role != before or number < 0):
            number += 1
        found.append(-1 if is_leading else number)
        before = role
    return found


def with_cost(usage: Json, settings: Settings, paid: Bill, num_output: int) -> Json:
    """OpenAI has one price for writing, whatever the lifetime."""
    if settings.price is None:
        return usage
    price = replace(settings.price, long_factor=WRITE_SHORT)
    return {**usage, "cost_usd": price.cost(paid, num_output)}


def has_explicit(ask: Ask) -> bool:
    return any(block.ttl_s is not None for block in ask.blocks)
