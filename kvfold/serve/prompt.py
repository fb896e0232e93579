"""From blocks to tokens through the model's chat template, with the place where each block ends.

A request is rendered twice, however many blocks it has: as it is, and with a mark behind each block, which is taken out
again. A text's mark stands behind it; a tool's, or a call's, is another tool, or call, whose name is the mark, since
templates write these as JSON. How a template writes one more of them it is asked once, on a small conversation. Each
stretch between two ends is tokenized on its own, markers or not, so a longer conversation begins with the tokens of a
shorter one.
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
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.request import Ask, Block

_OPEN, _CLOSE = f"\ue002{SECRET}:", "\ue003"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"

_LEAST_TOKENS = {"tool": 8, "tool_use": 8}  # their names and the JSON around them; a text has one or more

# Where texts are marked: nowhere, at their end, or, for templates that trim texts, before white space at their end. One
# without characters is not marked, as a template may ask whether there is text; it ends where what is before it does.
Marks = Literal["none", "end", "trimmed_end"]
Json = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """`ends`: tokens up to and including each block; None where the template does not keep blocks apart."""

    tokens: list[int]
    ends: list[int] | None


@dataclass(frozen=True)
class _Extra:
    """How a template writes one more tool, or call, behind another: `before`, its name, `after`.

    `tail`: what follows the last call of a message up to the end of its turn.
    """

    before: str
    after: str
    tail: str

    @classmethod
    def between(cls, one: str, two: str) -> _Extra | None:
        """`two` is the rendering with one more, whose name is a mark; None if that is not all that it has more."""
        at, size = _agree(one, two), len(two) - len(one)
        before, *rest = two[at : at + size].split(_mark(0))
        if len(rest) != 1 or two[at + size :] != one[at:]:
            return None
        return cls(before, rest[0], one[at:])


class Prompter:
    """Works in any number of threads at a time; its tokenizer is its own."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        """`max_tokens`: what the model takes; what can only be longer is refused before it is rendered."""
        self._max_tokens = max_tokens
        self._tokenizer = copy.deepcopy(tokenizer)
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self._encoder = TextEncoder(self._tokenizer)
        self._encoder.ids("")  # the first call may set a tokenizer up, which later ones then find so

    @property
    def has_tools(self) -> bool:
        """Whether the template takes tools, and has models write calls in a form that is read here."""
        return "tools" in self._template and TOOL_CALL in self._template

    def prompt(self, ask: Ask) -> Prompt:
        """Tokens of a request; ApiError if the template does not take it."""
        self._check_size(ask)
        if ask.raw_text is not None:
            tokens = self._encoder.ids(ask.raw_text, special=True)
            return Prompt(tokens, [len(tokens)])
        self._check(ask)
        text, ends = self._text(ask.blocks)
        return Prompt(self._encoder.ids(text), None) if ends is None else self._tokens(text, ends)

    def _check_size(self, ask: Ask) -> None:
        if self._max_tokens is None:
            return
        num_least = sum(_LEAST_TOKENS.get(block.kind, 1) for block in ask.blocks)
        if num_least > self._max_tokens:
            told = f"its {len(ask.blocks)} blocks take at least {num_least} tokens > {self._max_tokens} maximum"
            raise bad_request(f"prompt is too long: {told}")
        num_chars = len(ask.raw_text or "") + sum(len(block.text) for block in ask.blocks)
        most = self._max_tokens * self._longest_token
        if num_chars > most:
            told = f"its {num_chars} characters are more than the {most} that {self._max_tokens} tokens can hold"
            raise bad_request(f"prompt is too long: {told}")

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def _check(self, ask: Ask) -> None:
        if not self._template:
            raise bad_request("this model has no chat template; use /v1/completions, or serve an instruct model")
        if self.has_tools:
            return
        if ask.tools:
            raise bad_request("tools: this model's chat template has no tools; leave them out, or serve another model")
        if any(block.kind == "tool_use" for block in ask.blocks):
            raise bad_request(
                "messages: this model's chat template has no tools, and leaves calls of tools out; serve another model"
            )

    # Rendering

    def _text(self, blocks: Sequence[Block]) -> tuple[str, list[int] | None]:
        """The rendering, and how many characters of it end with each block."""
        blocks = [self._quoted(block) for block in blocks]
        plain = self._render(_messages(blocks, "none"), _tools(blocks))
        places: tuple[Marks, ...] = ("end", "trimmed_end")
        found = (self._ends(blocks, plain, marks) for marks in places)
        return plain, next((ends for ends in found if ends is not None), None)

    def _quoted(self, block: Block) -> Block:
        quote = self._encoder.quote
        return replace(block, text=quote(block.text), data=self._encoder.quote_json(dict(block.data)))

    def _ends(self, blocks: Sequence[Block], plain: str, marks: Marks) -> list[int] | None:
        """None if the rendering with marks is not the plain one with marks in it."""
        messages = _messages(blocks, marks, has_extra=self._extra_call is not None)
        try:
            marked = self._render(messages, _tools(blocks, has_extra=self._extra_tool is not None))
        except ApiError:  # e.g. a template that takes one call in a message
            return None
        text, found = self._take_out(marked, blocks)
        if text != plain:
            return None
        ends = [found.get(i, 0) + self._more(plain, found.get(i, 0), block) for i, block in enumerate(blocks)]
        return list(accumulate(ends, max))  # some templates write tools behind the system text

    def _take_out(self, marked: str, blocks: Sequence[Block]) -> tuple[str, dict[int, int]]:
        """The text without marks, and where each one was."""
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
        """Characters behind a tool or a call that are the same whether or not another one follows."""
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
        return self._between((user, [_tool("a")]), (user, [_tool("a"), _tool(_mark(0))]))

    @cached_property
    def _extra_call(self) -> _Extra | None:
        one, more = _call("a"), _call(_mark(0))
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
            told = "messages: the model's chat template does not take them"
            raise bad_request(f"{told}: {error}", logged=told) from error

    # Tokens

    def _tokens(self, text: str, ends: list[int]) -> Prompt:
        borders = sorted({0, *ends, len(text)})
        stretches = self._encoder.batch([text[begin:end] for begin, end in pairwise(borders)])
        count_at = dict(zip(borders, accumulate(map(len, stretches), initial=0), strict=True))
        return Prompt([token for stretch in stretches for token in stretch], [count_at[end] for end in ends])


def _mark(index: int) -> str:
    return f"{_OPEN}{index}{_CLOSE}"


def _agree(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def _call(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


def _asked(calls: list[Json]) -> list[Json]:
    """A conversation that ends with these calls."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]


def _tools(blocks: Sequence[Block], *, has_extra: bool = False) -> list[Json]:
    """Definitions as templates take them; with `has_extra` each is followed by one whose name is its mark."""
    found: list[Json] = []
    for index, block in enumerate(blocks):
        if block.kind == "tool":
            found.append({"type": "function", "function": dict(block.data)})
            found += [_tool(_mark(index))] if has_extra else []
    return found


class _Message:
    """One message as it is put together: texts are joined by lines."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._has_text = False
        self.calls: list[Json] = []

    def add(self, text: str, mark: str, marks: Marks) -> None:
        self._texts.append("\n" if self._has_text else "")
        self._has_text = self._has_text or bool(text)
        kept = text.rstrip() if marks == "trimmed_end" else text
        self._texts += [kept, mark if kept and marks != "none" else "", text[len(kept) :]]

    def json(self) -> Json:
        found: Json = {"role": self._role, "content": "".join(self._texts)}
        return {**found, "tool_calls": self.calls} if self.calls else found


def _messages(blocks: Sequence[Block], marks: Marks, *, has_extra: bool = False) -> list[Json]:
    """Messages as templates take them; a result of a tool is a message of its own."""
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
            message.calls += [_call(_mark(index))] if has_extra else []
        else:
            message.add(block.text, _mark(index), marks)
    return [message.json() for message in found]
