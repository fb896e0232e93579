"""Calls of tools: read out of a reply as it grows, and written in every format."""

from __future__ import annotations

import pytest

from kvfold.serve.api.tool_calls import ToolCall, ToolCallParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "cats"}}\n</tool_call>'


def read(text: str, size: int, *, is_on: bool = True) -> list[str | tuple[str, object]]:
    """Parts of a text that comes in pieces of so many characters, neighbouring texts joined."""
    reader, found = ToolCallParser(is_on), list[str | tuple[str, object]]()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_told_from_text_however_they_are_cut(size: int) -> None:
    look = ("look", {"at": "cats"})
    assert read(f"I look. {CALL}", size) == ["I look.", look]
    assert read(f"{CALL}\n{CALL} done", size) == [look, look, " done"]
    assert read("a <tool b < c", size) == ["a <tool b < c"]
    assert read("no end <tool_call>{", size) == ["no end <tool_call>{"]


@pytest.mark.parametrize("inside", ["not json", "[]", '{"name": 7}', '{"name": "x", "arguments": 7}', "[" * 100_000])
def test_what_is_no_call_stays_text(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert read(text, 1000) == [text]


def test_without_tools_nothing_is_looked_for() -> None:
    assert read(CALL, 3, is_on=False) == [CALL]


def test_every_call_has_an_id_of_its_own() -> None:
    first, second = ToolCallParser(True).add(CALL + CALL)
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id
