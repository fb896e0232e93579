"""Streaming parser of tool calls: JSON between <tool_call> and </tool_call>, the rest of the reply is text.

Text is emitted as soon as it cannot begin a call. A call that is no valid JSON object with a name stays text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvfold.engine.detokenizer import overlap
from kvfold.serve.api.strict_json import InvalidJson, parse_json
from kvfold.serve.ids import random_id
from kvfold.serve.prompt import TOOL_CALL, TOOL_CALL_END


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=random_id)

    @property
    def arguments_text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


class ToolCallParser:
    """Splits a growing reply into texts and calls; with `is_on=False` everything is text."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._held = ""

    def add(self, piece: str) -> list[str | ToolCall]:
        """Texts and calls that are complete now."""
        if not self._is_on:
            return [piece]
        self._held += piece
        return self._split()

    def is_text(self, piece: str) -> bool:
        """Whether `add` would return the piece as it is, and hold nothing back."""
        return not self._is_on or not (self._held or TOOL_CALL[0] in piece or piece[-1:].isspace())

    def finish(self) -> list[str | ToolCall]:
        """The reply has ended: what was held back is text."""
        rest, self._held = self._held, ""
        return [rest] if rest.strip() else []

    def _split(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while True:
            begin = self._held.find(TOOL_CALL)
            text = self._held[: begin if begin >= 0 else len(self._held) - overlap(self._held, TOOL_CALL)]
            text = text.rstrip()  # white space before a call is dropped
            if text:
                found.append(text)
                self._held = self._held[len(text) :]
            end = self._held.find(TOOL_CALL_END)
            if begin < 0 or end < 0:
                return found
            begin = self._held.find(TOOL_CALL)
            inside, whole = self._held[begin + len(TOOL_CALL) : end], self._held[: end + len(TOOL_CALL_END)]
            found.append(_call(inside) or whole)
            self._held = self._held[len(whole) :]


def _call(text: str) -> ToolCall | None:
    try:
        found = parse_json(text)
    except InvalidJson:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return ToolCall(found["name"], arguments) if isinstance(arguments, dict) else None
