"""OpenAI request fields shared by chat completions, completions and responses: sampling, tools, prompt cache, usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvfold.serve.api.errors import bad_request
from kvfold.serve.api.request import Block, Kind, Role, check_calls
from kvfold.serve.api.strict_json import InvalidJson, Json, parse_json
from kvfold.serve.api.validation import Fields, check_names
from kvfold.serve.cache.breakpoints import openai_plan
from kvfold.serve.cache.usage import WRITE_SHORT, Usage
from kvfold.serve.reply import Body, CachePlanner
from kvfold.serve.settings import Settings

TTL_S = {"30m": 1800.0, "12h": 43200.0}


@dataclass(frozen=True)
class OpenAIBody(Body):
    """`shows_usage`: at the end of a stream. `echo`: request fields repeated in the response."""

    shows_usage: bool = False
    echo: Json = field(default_factory=dict)


class OpenAIFields(Fields):
    """Fields that the three APIs share."""

    def seed(self) -> int | None:
        return self.optional_integer("seed", -(1 << 63), (1 << 63) - 1)

    def cache_options(self, *ttls: str) -> tuple[CachePlanner, str]:
        """`prompt_cache_options` and `prompt_cache_key`: requests of different keys share no cache."""
        options = self.object("prompt_cache_options") or OpenAIFields({})
        mode = options.choice("mode", ("implicit", "explicit"), "implicit")
        ttl = options.choice("ttl", ttls, "30m")
        plan = partial(openai_plan, ttl_s=TTL_S[ttl], is_implicit=mode == "implicit")
        return plan, self.text("prompt_cache_key", "")

    def who(self) -> Json:
        """`user`, whose facts a memory keeps, and fields without effect, for the client's own bookkeeping."""
        who: Json = {name: self.optional_text(name) for name in ("user", "safety_identifier")}
        return {**who, "metadata": self.pairs("metadata")}

    def stream(self) -> tuple[bool, bool]:
        """`stream`, and whether usage is sent at the end of the stream."""
        is_streamed, options = self.flag("stream", False), self.object("stream_options")
        if options is None:
            return is_streamed, False
        if not is_streamed:
            self.refuse("stream_options", "the field is for streams; leave it out, or set stream to true")
        shows_usage = options.flag("include_usage", False)
        options.neutral("openai_stream")
        return is_streamed, shows_usage

    def tools(self, *, is_nested: bool) -> list[Block]:
        """Function tools; chat completions nest their definition (`is_nested`)."""
        outer = self.objects("tools")
        for tool in outer:
            tool.choice("type", ("function",))
        inner = [tool.required_object("function") for tool in outer] if is_nested else outer
        found = [Block("tool", data=tool.definition("parameters", {})) for tool in inner]
        for tool in inner:
            tool.neutral("openai_tool")
        check_names(inner, [block.data["name"] for block in found])
        return found

    def tool_choice(self) -> str:
        found = self.choice("tool_choice", ("auto", "none"), "auto")
        self.neutral("openai_tools")
        return found

    def arguments(self) -> Json:
        """The JSON text under "arguments"."""
        try:
            found = parse_json(self.text("arguments") or "{}")
        except InvalidJson:
            found = None
        if not isinstance(found, dict):
            self.refuse("arguments", "the text of a JSON object is required")
        return found

    def text_parts(self, kinds: tuple[str, ...], name: str = "content") -> Parts:
        """Text parts of a required field."""
        content = self.require(name)
        if isinstance(content, str):
            return [(content, False)]
        if not isinstance(content, list):
            self.refuse(name, "a string or a list of text parts is required")
        if not content:
            self.refuse(name, "at least one part is required")
        return [part._text_part(kinds) for part in self.each(name, content)]

    def _text_part(self, kinds: tuple[str, ...]) -> tuple[str, bool]:
        self.choice("type", kinds)
        text, breakpoint_ = self.text("text"), self.object("prompt_cache_breakpoint")
        if breakpoint_ is not None:
            breakpoint_.choice("mode", ("explicit",))
            if not text:
                self.refuse("prompt_cache_breakpoint", "an empty text cannot carry it")
        self.neutral("openai_part")
        return text, breakpoint_ is not None


Parts = list[tuple[str, bool]]  # texts, and whether each has an explicit breakpoint


Turn = tuple[Role, Callable[[int], list[Block]]]  # of a message: its role, and what reads its blocks, given its index


def read_conversation(name: str, turns: Sequence[Turn]) -> list[Block]:
    """Blocks of the messages under the field `name`."""
    roles = [role for role, _ in turns]
    if not roles or roles[-1] == "assistant":
        raise bad_request(f"{name}: at least one is required, and the last must not be the assistant's")
    found = [block for number, (_, read) in zip(_numbered(roles), turns, strict=True) for block in read(number)]
    check_calls(found, name)
    return _without_empty(found)


def text_blocks(parts: Parts, role: Role, number: int) -> list[Block]:
    kind: Kind = "system" if role == "system" and number < 0 else "text"
    return [Block(kind, role, text, number, ttl_s=_ttl(marked)) for text, marked in parts]


def result_block(parts: Parts, call_id: str, number: int) -> Block:
    """A breakpoint on any part counts for the result's end, since a run of results has one boundary."""
    text, ttl_s = "\n".join(text for text, _ in parts), _ttl(any(marked for _, marked in parts))
    return Block("tool_result", "tool", text, number, {"id": call_id}, ttl_s)


def _ttl(is_marked: bool) -> float | None:
    return TTL_S["30m"] if is_marked else None


def _without_empty(blocks: Sequence[Block]) -> list[Block]:
    """Drop empty texts of messages that have other content; keep one of an empty message."""
    seen = {block.message for block in blocks if block.text or block.kind in ("tool_use", "tool_result")}
    kept: list[Block] = []
    for block in blocks:
        if block.text or block.kind not in ("text", "system") or block.message not in seen:
            kept.append(block)
        seen.add(block.message)
    return kept


def _numbered(roles: Sequence[str]) -> list[int]:
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
