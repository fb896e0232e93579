"""OpenAI request fields shared by chat completions, completions and responses: sampling, tools, prompt cache, usage."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvfold.engine.sampling import Sampling
from kvfold.serve.api.request import Block, ChatRequest, Role
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.validation import Fields, Neutral, Only, check_names, tool_name
from kvfold.serve.cache.breakpoints import Boundary, CachePlan, openai_plan
from kvfold.serve.cache.usage import WRITE_SHORT, Usage
from kvfold.serve.settings import Settings

TTL_S = {"30m": 1800.0, "12h": 43200.0}
NEUTRAL: dict[str, Neutral] = {
    "service_tier": Only("there is one tier here", ("auto", "default")),
    "store": Only("this server keeps no replies", (False,)),
}
LOGIT_NEUTRAL: dict[str, Neutral] = {
    "n": Only("one reply is written for each request", (1,)),
    "presence_penalty": Only("penalties are not supported", (0,)),
    "frequency_penalty": Only("penalties are not supported", (0,)),
    "logit_bias": Only("logits are not biased here", ({},)),
}
_NEUTRAL_TOOL: dict[str, Neutral] = {
    "strict": Only("calls are not held to a schema here", (False,)),
    "defer_loading": Only("tools are always loaded here", (False,)),
    "async": Only("calls are not asynchronous here", (False,)),
    "allowed_callers": Only("tools are called by the model alone", (["direct"],)),
}
_NEUTRAL_PART: dict[str, Neutral] = {  # of a reply that is sent back
    "annotations": Only("annotations are not supported", ([],)),
    "logprobs": Only("log probabilities are not supported", ([],)),
}


@dataclass(frozen=True)
class CacheOptions:
    """`prompt_cache_options` and `prompt_cache_key` (`key`): requests of different keys share no cache."""

    is_implicit: bool = True
    ttl_s: float = TTL_S["30m"]
    key: str = ""

    def plan(self, boundaries: Sequence[Boundary], min_tokens: int) -> CachePlan:
        return openai_plan(boundaries, min_tokens, self.ttl_s, is_implicit=self.is_implicit)


@dataclass(frozen=True)
class OpenAIBody:
    """A request; `cache_options` None: no caching. `shows_usage`: at the end of a stream."""

    request: ChatRequest
    cache_options: CacheOptions | None
    is_streamed: bool = False
    shows_usage: bool = False
    echo: Json = field(default_factory=dict)  # request fields repeated in the response


def read_sampling(body: Fields, settings: Settings) -> Sampling:
    temperature = body.number("temperature", settings.temperature, 0.0, 2.0)
    top_p = body.number("top_p", 1.0, 1e-6, 1.0)
    seed = body.optional_integer("seed", -(1 << 63), (1 << 63) - 1)
    return Sampling(temperature, 0, top_p, secrets.randbits(63) if seed is None else seed & ((1 << 63) - 1))


def read_cache_options(body: Fields, ttls: Iterable[str]) -> CacheOptions:
    key = body.text("prompt_cache_key", "")
    options = body.object("prompt_cache_options")
    if options is None:
        return CacheOptions(key=key)
    mode = options.choice("mode", ("implicit", "explicit"), "implicit")
    ttl = options.choice("ttl", ttls, "30m")
    options.end()
    return CacheOptions(mode == "implicit", TTL_S[ttl], key)


def read_who(body: Fields) -> Json:
    """Fields without effect, for the client's own bookkeeping."""
    who: Json = {name: body.optional_text(name) for name in ("user", "safety_identifier")}
    return {**who, "metadata": body.pairs("metadata")}


def read_stream(body: Fields) -> tuple[bool, bool]:
    """`stream`, and whether usage is sent at the end of the stream."""
    is_streamed, options = body.flag("stream", False), body.object("stream_options")
    if options is None:
        return is_streamed, False
    if not is_streamed:
        body.refuse("stream_options", "the field is for streams; leave it out, or set stream to true")
    shows_usage = options.flag("include_usage", False)
    options.neutral({"include_obfuscation": Only("streams are not padded here", (False,))})
    options.end()
    return is_streamed, shows_usage


def read_tools(body: Fields, *, is_nested: bool) -> list[Block]:
    """Function tools; chat completions nest their definition (`is_nested`)."""
    found = []
    for i, item in enumerate(body.items("tools")):
        tool = Fields(item, f"tools.{i}")
        tool.choice("type", ("function",))
        inner = (tool.object("function") if is_nested else tool) or Fields(None, f"tools.{i}.function")
        definition = {
            "name": tool_name(inner),
            "description": inner.text("description", ""),
            "parameters": inner.data("parameters", {}),
        }
        inner.neutral(_NEUTRAL_TOOL)
        inner.end()
        tool.end()
        found.append(Block("tool", data=definition))
    inside = ".function" if is_nested else ""
    check_names((f"tools.{i}{inside}", block.data["name"]) for i, block in enumerate(found))
    return found


def read_tool_choice(body: Fields) -> str:
    found = body.choice("tool_choice", ("auto", "none"), "auto")
    body.neutral({"parallel_tool_calls": Only("the number of calls is the model's", (True,))})
    return found


Parts = list[tuple[str, bool]]  # texts, and whether each has an explicit breakpoint


def text_parts(message: Fields, kinds: tuple[str, ...], name: str = "content") -> Parts:
    """Text parts of a required field."""
    content = message.require(name)
    if isinstance(content, str):
        return [(content, False)]
    if not isinstance(content, list):
        message.refuse(name, "a string or a list of text parts is required")
    if not content:
        message.refuse(name, "at least one part is required")
    return [_text_part(Fields(item, f"{message.path(name)}.{i}"), kinds) for i, item in enumerate(content)]


def _text_part(part: Fields, kinds: tuple[str, ...]) -> tuple[str, bool]:
    part.choice("type", kinds)
    text, breakpoint_ = part.text("text"), part.object("prompt_cache_breakpoint")
    if breakpoint_ is not None:
        breakpoint_.choice("mode", ("explicit",))
        breakpoint_.end()
        if not text:
            part.refuse("prompt_cache_breakpoint", "an empty text cannot carry it")
    part.neutral(_NEUTRAL_PART)
    part.end()
    return text, breakpoint_ is not None


def text_blocks(parts: Parts, role: Role, number: int) -> list[Block]:
    kind: Any = "system" if role == "system" and number < 0 else "text"
    return [Block(kind, role, text, number, ttl_s=_ttl(marked)) for text, marked in parts]


def result_block(parts: Parts, call_id: str, number: int) -> Block:
    """A breakpoint on any part counts for the result's end, since a run of results has one boundary."""
    text, ttl_s = "\n".join(text for text, _ in parts), _ttl(any(marked for _, marked in parts))
    return Block("tool_result", "tool", text, number, {"id": call_id}, ttl_s)


def _ttl(is_marked: bool) -> float | None:
    return TTL_S["30m"] if is_marked else None


def without_empty(blocks: Sequence[Block]) -> list[Block]:
    """Drop empty texts of messages that have other content; keep one of an empty message."""
    filled = {block.message for block in blocks if block.text or block.kind in ("tool_use", "tool_result")}
    kept, empty = list[Block](), set[int]()
    for block in blocks:
        is_empty = block.kind in ("text", "system") and not block.text
        if is_empty and (block.message in filled or block.message in empty):
            continue
        if is_empty:
            empty.add(block.message)
        kept.append(block)
    return kept


def numbered(roles: Sequence[str]) -> list[int]:
    """Message indices: -1 for leading system messages; consecutive messages of one role share an index."""
    found: list[int] = []
    number, before = -1, ""
    for role in roles:
        is_leading = role == "system" and number < 0
        if not is_leading and (role != before or number < 0):
            number += 1
        found.append(-1 if is_leading else number)
        before = role
    return found


def with_cost(found: Json, settings: Settings, usage: Usage, num_output: int) -> Json:
    """OpenAI has one price for cache writes, whatever their time to live."""
    if settings.price is None:
        return found
    price = replace(settings.price, long_factor=WRITE_SHORT)
    return {**found, "cost_usd": price.cost(usage, num_output)}


def has_explicit(request: ChatRequest) -> bool:
    return any(block.ttl_s is not None for block in request.blocks)
