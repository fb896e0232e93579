"""Chat-template rendering and tokenization of a request, with the token position where each content block ends.

A request is rendered twice, whatever its number of blocks: as it is, and with a sentinel after each block, which is
removed again. A text's sentinel follows it; that of a tool or tool call is another tool or call named by the sentinel,
since templates write these as JSON. How a template writes one more of them is probed once, on a small conversation.
Each span between two block ends is tokenized on its own, with or without cache markers, so the tokens of a conversation
are a prefix of those of its continuation.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from jinja2 import TemplateError

from kvfold.models.special_tokens import SECRET, TextEncoder
from kvfold.serve.api.errors import ApiError, bad_request, prompt_too_long
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.api.strict_json import Json

_OPEN, _CLOSE = f"\ue002{SECRET}:", "\ue003"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"

_LEAST_TOKENS = {"tool": 8, "tool_use": 8}  # their names and the JSON around them; a text has one or more

# Sentinels of texts: none, at the end, or, for templates that trim texts, before trailing white space. An empty text
# has none, since templates may test for text; it ends where the block before it does.
SentinelAt = Literal["none", "end", "trimmed_end"]


@dataclass(frozen=True)
class Prompt:
    """`ends`: tokens up to and including each block; None where the template rewrites blocks."""

    tokens: list[int]
    ends: list[int] | None
    num_cut: int = 0  # tokens that shortening cut before


@dataclass(frozen=True)
class _Extra:
    """How a template writes one more tool, or call, after another: `before`, its name, `after`.

    `tail`: what follows the last call of a message up to the end of the message.
    """

    before: str
    after: str
    tail: str

    @classmethod
    def between(cls, one: str, two: str) -> _Extra | None:
        """`two`: the rendering with one more, named by a sentinel; None if they differ in anything else."""
        at, size = _agree(one, two), len(two) - len(one)
        before, *rest = two[at : at + size].split(_sentinel(0))
        if len(rest) != 1 or two[at + size :] != one[at:]:
            return None
        return cls(before, rest[0], one[at:])


class PromptRenderer:
    """Thread-safe: has a copy of the tokenizer."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        """`max_tokens`: the model's context length; prompts that must be longer are refused before rendering."""
        self._max_tokens = max_tokens
        self._tokenizer = copy.deepcopy(tokenizer)
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self._encoder = TextEncoder(self._tokenizer)
        self._encoder.ids("")  # the first call may change a tokenizer's state

    @property
    def has_tools(self) -> bool:
        """Whether the template supports tools, with calls in the <tool_call> format."""
        return "tools" in self._template and TOOL_CALL in self._template

    def prompt(self, request: ChatRequest) -> Prompt:
        """Tokens of a request; ApiError if the template rejects it."""
        self._check_size(request)
        if request.raw_ids is not None:
            return self._given(list(request.raw_ids))
        if request.raw_text is not None:
            tokens = self._encoder.ids(request.raw_text, special=True)
            return Prompt(tokens, [len(tokens)])
        self._check(request)
        text, ends = self._text(request.blocks)
        return Prompt(self._encoder.ids(text), None) if ends is None else self._tokens(text, ends)

    def _given(self, tokens: list[int]) -> Prompt:
        most = len(self._tokenizer) - 1
        if not all(0 <= token <= most for token in tokens):
            raise bad_request(f"prompt: token ids from 0 to {most} are required")
        return Prompt(tokens, [len(tokens)])

    def _check_size(self, request: ChatRequest) -> None:
        if self._max_tokens is None:
            return
        num_least = sum(_LEAST_TOKENS.get(block.kind, 1) for block in request.blocks)
        if num_least > self._max_tokens:
            message = f"its {len(request.blocks)} blocks take at least {num_least} tokens > {self._max_tokens} maximum"
            raise prompt_too_long(message)
        num_chars = len(request.raw_text or "") + sum(len(block.text) for block in request.blocks)
        most = self._max_tokens * self._longest_token
        if num_chars > most:
            message = f"its {num_chars} characters are more than the {most} that {self._max_tokens} tokens can hold"
            raise prompt_too_long(message)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def _check(self, request: ChatRequest) -> None:
        if not self._template:
            raise bad_request("this model has no chat template; use /v1/completions, or serve an instruct model")
        if self.has_tools:
            return
        if request.tools:
            raise bad_request("tools: this model's chat template has no tools; leave them out, or serve another model")
        if any(block.kind == "tool_use" for block in request.blocks):
            raise bad_request(
                "messages: this model's chat template has no tools, and leaves calls of tools out; serve another model"
            )

    # Rendering

    def _text(self, blocks: Sequence[Block]) -> tuple[str, list[int] | None]:
        """The rendering, and the character position where each block ends."""
        blocks = [self._quoted(block) for block in blocks]
        plain = self._render(_messages(blocks, "none"), _tools(blocks))
        tried: tuple[SentinelAt, ...] = ("end", "trimmed_end")
        found = (self._ends(blocks, plain, sentinel_at) for sentinel_at in tried)
        return plain, next((ends for ends in found if ends is not None), None)

    def _quoted(self, block: Block) -> Block:
        quote = self._encoder.quote
        return replace(block, text=quote(block.text), data=self._encoder.quote_json(dict(block.data)))

    def _ends(self, blocks: Sequence[Block], plain: str, sentinel_at: SentinelAt) -> list[int] | None:
        """None if the rendering without its sentinels is not the plain one."""
        messages = _messages(blocks, sentinel_at, has_extra=self._extra_call is not None)
        try:
            marked = self._render(messages, _tools(blocks, has_extra=self._extra_tool is not None))
        except ApiError:  # e.g. a template that allows one call in a message
            return None
        text, found = self._take_out(marked, blocks)
        if text != plain:
            return None
        ends = [found.get(i, 0) + self._more(plain, found.get(i, 0), block) for i, block in enumerate(blocks)]
        return list(accumulate(ends, max))  # some templates write tools after the system text

    def _take_out(self, marked: str, blocks: Sequence[Block]) -> tuple[str, dict[int, int]]:
        """The text without sentinels, and the position of each."""
        first, *rest = marked.split(_OPEN)
        parts, length, found = [first], len(first), dict[int, int]()
        for part in rest:
            number, _, after = part.partition(_CLOSE)
            extra = self._extra(blocks[int(number)])
            if extra is not None:
                length -= len(extra.before)
                parts[-1], after = parts[-1].removesuffix(extra.before), after.removeprefix(extra.after)
            found[int(number)] = length
            parts.append(after)
            length += len(after)
        return "".join(parts), found

    def _more(self, plain: str, at: int, block: Block) -> int:
        """Characters after a tool or call that are the same whether or not another one follows."""
        extra = self._extra(block)
        if extra is None:
            return 0
        either = extra.before if block.kind == "tool" else extra.tail
        return _agree(plain[at : at + len(either)], either)

    def _extra(self, block: Block) -> _Extra | None:
        return {"tool": self._extra_tool, "tool_use": self._extra_call}.get(block.kind)

    @cached_property
    def _extra_tool(self) -> _Extra | None:
        user = [{"role": "user", "content": "a"}]
        return self._between((user, [_tool("a")]), (user, [_tool("a"), _tool(_sentinel(0))]))

    @cached_property
    def _extra_call(self) -> _Extra | None:
        one, more = _call("a"), _call(_sentinel(0))
        return self._between((_asked([one]), []), (_asked([one, more]), []))

    def _between(self, one: tuple[list[Json], list[Json]], two: tuple[list[Json], list[Json]]) -> _Extra | None:
        if not self.has_tools:
            return None
        try:
            return _Extra.between(self._render(*one, opens_reply=False), self._render(*two, opens_reply=False))
        except ApiError:
            return None

    def _render(self, messages: list[Json], tools: list[Json], *, opens_reply: bool = True) -> str:
        more: Json = {"tools": tools} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_reply, **more)
            )
        except (TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
            message = "messages: the model's chat template rejects them"
            raise bad_request(f"{message}: {error}", logged=message) from error

    # Tokens

    def _tokens(self, text: str, ends: list[int]) -> Prompt:
        borders = sorted({0, *ends, len(text)})
        stretches = self._encoder.batch([text[begin:end] for begin, end in pairwise(borders)])
        count_at = dict(zip(borders, accumulate(map(len, stretches), initial=0), strict=True))
        return Prompt([token for stretch in stretches for token in stretch], [count_at[end] for end in ends])


def _sentinel(index: int) -> str:
    return f"{_OPEN}{index}{_CLOSE}"


def _agree(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def _call(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


def _asked(calls: list[Json]) -> list[Json]:
    """A conversation that ends with these tool calls."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]


def _tools(blocks: Sequence[Block], *, has_extra: bool = False) -> list[Json]:
    """Tool definitions for the template; with `has_extra` each is followed by one named by its sentinel."""
    found: list[Json] = []
    for index, block in enumerate(blocks):
        if block.kind == "tool":
            found.append({"type": "function", "function": dict(block.data)})
            found += [_tool(_sentinel(index))] if has_extra else []
    return found


class _Message:
    """One message being assembled; texts are joined by newlines."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._has_text = False
        self.calls: list[Json] = []

    def add(self, text: str, sentinel: str, sentinel_at: SentinelAt) -> None:
        self._texts.append("\n" if self._has_text else "")
        self._has_text = self._has_text or bool(text)
        kept = text.rstrip() if sentinel_at == "trimmed_end" else text
        self._texts += [kept, sentinel if kept and sentinel_at != "none" else "", text[len(kept) :]]

    def json(self) -> Json:
        found: Json = {"role": self._role, "content": "".join(self._texts)}
        return {**found, "tool_calls": self.calls} if self.calls else found


def _messages(blocks: Sequence[Block], sentinel_at: SentinelAt, *, has_extra: bool = False) -> list[Json]:
    """Messages for the template; a tool result is a message of its own."""
    found: list[_Message] = []
    last: tuple[int, str] | None = None
    for index, block in enumerate(blocks):
        if block.kind == "tool":
            continue
        if (block.message, block.role) != last or block.kind == "tool_result":
            found.append(_Message(block.role))
        message, last = found[-1], (block.message, block.role)
        if block.kind == "tool_use":
            function = {"name": block.data["name"], "arguments": block.data["arguments"]}
            message.calls.append({"type": "function", "function": function})
            message.calls += [_call(_sentinel(index))] if has_extra else []
        else:
            message.add(block.text, _sentinel(index), sentinel_at)
    return [message.json() for message in found]
