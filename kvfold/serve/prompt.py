"""From blocks to tokens through the model's chat template, with the place where each block ends.

Texts are rendered with a mark of ours behind each, and the marks taken out again tell where blocks end; tools and
calls of tools, which templates write as JSON, end where renderings that agree up to them part. Each stretch between
two ends is tokenized on its own, markers or not, so a longer conversation begins with the tokens of a shorter one.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from kvfold.serve.api_error import bad_request
from kvfold.serve.ask import Ask, Block

_OPEN, _CLOSE = "\ue000" + secrets.token_hex(8), "\ue001"  # nobody else can know, and so write, these
_OTHER_TOOL: dict[str, Any] = {"name": _OPEN, "description": _OPEN, "parameters": {}}
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Prompt:
    """`ends`: tokens up to and including each block; None where the template does not keep blocks apart."""

    tokens: list[int]
    ends: list[int] | None


class Prompter:
    """Has a tokenizer of its own, so that it can work while the model's thread makes text of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self._lock = Lock()

    @property
    def has_tools(self) -> bool:
        """Whether the template takes tools, and has models write calls in a form that is read here."""
        return "tools" in self._template and TOOL_CALL in self._template

    def prompt(self, ask: Ask) -> Prompt:
        """Tokens of a request; ApiError if the template does not take it."""
        with self._lock:
            if ask.raw_text is not None:
                return Prompt(self._encode(ask.raw_text, special=True), [])
            self._check(ask)
            return self._prompt(list(ask.blocks))

    def _check(self, ask: Ask) -> None:
        if not self._template:
            raise bad_request("this model has no chat template; use /v1/completions, or serve an instruct model")
        if ask.tools and not self.has_tools:
            raise bad_request("tools: this model's chat template has no tools; leave them out, or serve another model")

    def _prompt(self, blocks: list[Block]) -> Prompt:
        plain = self._render(blocks, marks=False)
        marked = self._render(blocks, marks=True)
        text, found = _take_out(marked)
        if text != plain:  # a template that trims or rewrites texts
            return Prompt(self._encode(plain), None)
        ends = [found[i] if i in found else self._json_end(blocks, i, plain) for i in range(len(blocks))]
        ends = list(accumulate(ends, max))  # some templates write tools behind the system text
        return self._tokens(plain, ends)

    def _json_end(self, blocks: list[Block], index: int, plain: str) -> int:
        """Where a rendering that goes on differently after this block parts from the whole."""
        block = blocks[index]
        if block.kind == "tool":
            rest = [other for other in blocks[index + 1 :] if other.kind != "tool"]
            other = self._render([*blocks[: index + 1], Block("tool", data=_OTHER_TOOL), *rest], marks=False)
        else:
            other = self._render(blocks[: index + 1], marks=False, opens_reply=False) + _OPEN
        return _agree(plain, other)

    def _tokens(self, text: str, ends: list[int]) -> Prompt:
        borders = sorted({0, *ends, len(text)})
        tokens: list[int] = []
        count_at = {0: 0}
        for begin, end in pairwise(borders):
            tokens += self._encode(text[begin:end])
            count_at[end] = len(tokens)
        return Prompt(tokens, [count_at[end] for end in ends])

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return found

    def _render(self, blocks: Sequence[Block], *, marks: bool, opens_reply: bool = True) -> str:
        tools = [{"type": "function", "function": dict(block.data)} for block in blocks if block.kind == "tool"]
        more: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    _messages(blocks, marks), tokenize=False, add_generation_prompt=opens_reply, **more
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise bad_request(f"messages: the model's chat template does not take them: {error}") from error


def _agree(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _messages(blocks: Sequence[Block], marks: bool) -> list[dict[str, Any]]:
    """Messages as templates take them; a result of a tool is a message of its own."""
    found: list[dict[str, Any]] = []
    last: tuple[int, str] | None = None
    for index, block in enumerate(blocks):
        if block.kind == "tool":
            continue
        if (block.message, block.role) != last or block.kind == "tool_result":
            found.append({"role": block.role, "content": ""})
        message, last = found[-1], (block.message, block.role)
        if block.kind == "tool_use":
            call = {"name": block.data["name"], "arguments": block.data["arguments"]}
            message.setdefault("tool_calls", []).append({"type": "function", "function": call})
        else:
            message["content"] += ("\n" if message["content"] else "") + block.text
            message["content"] += f"{_OPEN}{index}{_CLOSE}" if marks else ""
    return found


def _take_out(text: str) -> tuple[str, dict[int, int]]:
    """The text without marks, and where each one was."""
    first, *rest = text.split(_OPEN)
    parts, length, found = [first], len(first), {}
    for part in rest:
        index, _, after = part.partition(_CLOSE)
        found[int(index)] = length
        parts.append(after)
        length += len(after)
    return "".join(parts), found
