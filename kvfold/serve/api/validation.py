"""Request validation: fields of a JSON object are read one by one with their types; unread fields are refused by name.

A null field counts as absent. No field is accepted and ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from kvfold.serve.api.errors import bad_request
from kvfold.serve.settings import MAX_STOP_CHARS

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True)
class Only:
    """A field accepted only with these `values`, which have no effect; `why`: the reason others are refused."""

    why: str
    values: tuple[object, ...] = ()


Neutral: TypeAlias = "Only | Mapping[str, Neutral]"  # a mapping: an object whose fields are neutral


class Fields:
    """`where`: path of the object in the request, empty at its top level."""

    def __init__(self, data: object, where: str = "") -> None:
        self.where = where
        if not isinstance(data, dict):
            raise bad_request(f"{where or 'the body'}: an object is required, not {_kind(data)}")
        self._left: dict[str, Any] = {name: value for name, value in data.items() if value is not None}
        self._taken: list[str] = []

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        return name in self._left

    def refuse(self, name: str, reason: str, but: str = "") -> NoReturn:
        """`but`: the value received, which is not logged."""
        message = f"{self.path(name)}: {reason}"
        raise bad_request(f"{message}, not {but}" if but else message, logged=message)

    def take(self, name: str) -> Any:
        """Its value of any type; None if absent."""
        self._taken.append(name)
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """Its value, without marking it as read."""
        return self._left.get(name)

    def require(self, name: str) -> Any:
        found = self.take(name)
        if found is None:
            self.refuse(name, "the field is required")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        found = self.take(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            self.refuse(name, f"a string is required, not {_kind(found)}")
        return found

    def filled_text(self, name: str) -> str:
        found = self.text(name)
        if not found:
            self.refuse(name, "a text that is not empty is required")
        return found

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else self.take(name)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            self.refuse(name, f"a whole number from {low} to {high} is required", _shown(found))
        return found

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return self.integer(name, None, low, high) if self.has(name) else self.take(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool) or not low <= found <= high:
            self.refuse(name, f"a number from {low:g} to {high:g} is required", _shown(found))
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, bool):
            self.refuse(name, f"true or false is required, not {_kind(found)}")
        return found

    def choice(self, name: str, allowed: Iterable[str], default: str | None = None) -> str:
        found, names = self.take(name), list(allowed)
        found = default if found is None else found
        if found is None:
            self.refuse(name, f"the field is required; supported: {', '.join(names)}")
        if not isinstance(found, str) or found not in names:
            reason = f"is not supported; supported: {', '.join(names)}"
            raise bad_request(f"{self.path(name)}: {_shown(found)} {reason}", logged=f"{self.path(name)}: it {reason}")
        return found

    def items(self, name: str) -> list[Any]:
        """A list; empty if absent."""
        found = self.take(name)
        if found is None:
            return []
        if not isinstance(found, list):
            self.refuse(name, f"a list is required, not {_kind(found)}")
        return found

    def texts(self, name: str, most: int) -> list[str]:
        """Stop strings: non-empty, of bounded length; a single string counts as a list of one."""
        found = self.take(name)
        found = [] if found is None else [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(x, str) and x for x in found):
            self.refuse(name, f"up to {most} non-empty strings are required")
        if len(found) > most:
            self.refuse(name, f"up to {most} non-empty strings are required; {len(found)} came")
        longest = max(map(len, found), default=0)
        if longest > MAX_STOP_CHARS:
            self.refuse(name, f"strings of up to {MAX_STOP_CHARS} characters are required; one has {longest}")
        return found

    def object(self, name: str) -> Fields | None:
        found = self.take(name)
        return None if found is None else Fields(found, self.path(name))

    def data(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """An object that is passed on unchecked."""
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, dict):
            self.refuse(name, f"an object is required, not {_kind(found)}")
        return found

    def pairs(self, name: str) -> dict[str, str]:
        """Pairs of strings within OpenAI's limits on `metadata`."""
        found = self.data(name, {})
        if len(found) > 16 or not all(_is_pair(*pair) for pair in found.items()):
            self.refuse(name, "up to 16 pairs of strings are required, names up to 64 characters and values up to 512")
        return found

    def neutral(self, table: Mapping[str, Neutral]) -> None:
        """Read fields that are accepted with no-effect values only; refuse any other value."""
        for name, allowed in table.items():
            if not isinstance(allowed, Only):
                inside = self.object(name)
                if inside is not None:
                    inside.neutral(allowed)
                    inside.end()
                continue
            found = self.take(name)
            if found is not None and not any(_is_same(found, value) for value in allowed.values):
                instead = "".join(f" or send {json.dumps(value)}" for value in allowed.values)
                self.refuse(name, f"{allowed.why}; leave it out{instead}")

    def end(self) -> None:
        """Refuse unread fields."""
        for name in self._left:
            allowed = ", ".join(dict.fromkeys(self._taken))
            self.refuse(name[:80], f"the field is not supported here; supported: {allowed}")


def tool_name(fields: Fields) -> str:
    found = fields.text("name")
    if not TOOL_NAME.fullmatch(found):
        fields.refuse("name", "1 to 128 letters, digits, _ and - are required", _shown(found))
    return found


def check_names(tools: Iterable[tuple[str, str]]) -> None:
    """Tool names are unique; `tools`: (path, name) pairs."""
    seen: dict[str, str] = {}
    for path, name in tools:
        if name in seen:
            raise bad_request(f'{path}.name: "{name}" is the name of {seen[name]} too; give each tool its own')
        seen[name] = path


def _is_same(found: object, value: object) -> bool:
    """JSON equality: 0 == 0.0, 1 != true."""
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _is_pair(name: str, value: object) -> bool:
    return len(name) <= 64 and isinstance(value, str) and len(value) <= 512


def _shown(value: object) -> str:
    """The received value, shortened."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return f"{value!r}"[:80]
    return f'"{value[:80]}"' if isinstance(value, str) else _kind(value)


def _kind(value: object) -> str:
    kinds = {type(None): "absent", str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "a number")
