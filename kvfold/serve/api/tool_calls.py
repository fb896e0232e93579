"""Calls of tools in a reply: what stands between <tool_call> and </tool_call> is JSON, the rest is text.

Text is passed on as soon as it cannot begin a call. A call that is no valid JSON object with a name stays text.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from kvfold.engine.stop_strings import overlap
from kvfold.serve.api.strict_json import InvalidJson, parse_json
from kvfold.serve.prompt import TOOL_CALL, TOOL_CALL_END


@dataclass(frozen=True)
class Call:
    """A tool the model calls; `arguments` is an object."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class CallReader:
    """Splits a growing reply; told `is_on=False`, it passes everything on as text."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._held = ""

    def add(self, piece: str) -> list[str | Call]:
        """Texts and calls that are complete now."""
        if not self._is_on:
            return [piece]
        self._held += piece
        return self._split()

    def finish(self) -> list[str | Call]:
        """No piece follows: what was held back is text."""
        rest, self._held = self._held, ""
        return [rest] if rest.strip() else []

    def _split(self) -> list[str | Call]:
        found: list[str | Call] = []
        while True:
            begin = self._held.find(TOOL_CALL)
            text = self._held[: begin if begin >= 0 else len(self._held) - overlap(self._held, TOOL_CALL)]
            text = text.rstrip()  # white space waits: before a call it belongs to nobody
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


def _call(text: str) -> Call | None:
    try:
        found = parse_json(text)
    except InvalidJson:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return Call(found["name"], arguments) if isinstance(arguments, dict) else None
