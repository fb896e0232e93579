"""Request validation: fields of a JSON object are read one by one with their types; unread fields are refused by name.

A null field counts as absent. No field is accepted and ignored.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn, Self

from kvfold.engine.sampling import Sampling
from kvfold.serve.api.errors import bad_request
from kvfold.serve.ids import random_seed
from kvfold.serve.settings import MAX_STOP_CHARS, MAX_TEMPERATURE, Settings

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@cache
def _neutral_tables() -> Mapping[str, Any]:
    return tomllib.loads((files("kvfold.serve.api") / "neutral_fields.toml").read_text(encoding="utf-8"))


class Fields:
    """`where`: path of the object in the request, empty at its top level."""

    def __init__(self, data: object, where: str = "") -> None:
        self.where = where
        if not isinstance(data, dict):
            raise bad_request(f"{where or 'the body'}: an object is required, not {_kind(data)}")
        self._left: dict[str, Any] = {name: value for name, value in data.items() if value is not None}
        self._taken: list[str] = []
        self._inside: list[Fields] = []  # objects that were read of it

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        return name in self._left

    def refuse(self, name: str, reason: str, but: str = "", why: str = "") -> NoReturn:
        """`but`: the value received, which is not logged."""
        message, why = f"{self.path(name)}: {reason}", f"; {why}" if why else ""
        raise bad_request(f"{message}, not {but}{why}" if but else message + why, logged=message + why)

    def take(self, name: str, default: Any = None) -> Any:
        """Its value of any type; the default if absent."""
        self._taken.append(name)
        return self._left.pop(name, default)

    def peek(self, name: str) -> Any:
        """Its value, without marking it as read."""
        return self._left.get(name)

    def require(self, name: str) -> Any:
        found = self.take(name)
        if found is None:
            self.refuse(name, "the field is required")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        found = self.take(name, default)
        if not isinstance(found, str):
            self.refuse(name, f"a string is required, not {_kind(found)}")
        return found

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else self.take(name)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int:
        found = self.take(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            wanted = f"a whole number from {low} to {high} is required" if low < high else f"only {low} is supported"
            self.refuse(name, wanted, _shown(found))
        return found

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return self.integer(name, None, low, high) if self.has(name) else self.take(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        found = self.take(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not low <= found <= high:
            self.refuse(name, f"a number from {low:g} to {high:g} is required", _shown(found))
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.take(name, default)
        if not isinstance(found, bool):
            self.refuse(name, f"true or false is required, not {_kind(found)}")
        return found

    def choice(self, name: str, allowed: Iterable[str], default: str | None = None) -> str:
        found, names = self.take(name, default), list(allowed)
        if found is None:
            self.refuse(name, f"the field is required; supported: {', '.join(names)}")
        if not isinstance(found, str) or found not in names:
            reason = f"is not supported; supported: {', '.join(names)}"
            raise bad_request(f"{self.path(name)}: {_shown(found)} {reason}", logged=f"{self.path(name)}: it {reason}")
        return found

    def items(self, name: str) -> list[Any]:
        """A list; empty if absent."""
        found = self.take(name, [])
        if not isinstance(found, list):
            self.refuse(name, f"a list is required, not {_kind(found)}")
        return found

    def texts(self, name: str, most: int) -> list[str]:
        """Stop strings: non-empty, of bounded length; a single string counts as a list of one."""
        found = self.take(name, [])
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(x, str) and x for x in found):
            self.refuse(name, f"up to {most} non-empty strings are required")
        if len(found) > most:
            self.refuse(name, f"up to {most} non-empty strings are required; {len(found)} came")
        longest = max(map(len, found), default=0)
        if longest > MAX_STOP_CHARS:
            self.refuse(name, f"strings of up to {MAX_STOP_CHARS} characters are required; one has {longest}")
        return found

    def object(self, name: str) -> Self | None:
        return self.required_object(name) if self.has(name) else self.take(name)

    def required_object(self, name: str) -> Self:
        return self._read(self.take(name), name)

    def objects(self, name: str) -> list[Self]:
        """A list of objects; empty if absent."""
        return self.each(name, self.items(name))

    def each(self, name: str, items: Iterable[Any]) -> list[Self]:
        """The objects of a list that is or was under `name`."""
        return [self._read(item, f"{name}.{i}") for i, item in enumerate(items)]

    def _read(self, data: Any, name: str) -> Self:
        found = type(self)(data, self.path(name))
        self._inside.append(found)
        return found

    def data(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """An object that is passed on unchecked."""
        found = self.take(name, default)
        if not isinstance(found, dict):
            self.refuse(name, f"an object is required, not {_kind(found)}")
        return found

    def pairs(self, name: str) -> dict[str, str]:
        """Pairs of strings within OpenAI's limits on `metadata`."""
        found = self.data(name, {})
        are_short = (len(name) <= 64 and isinstance(text, str) and len(text) <= 512 for name, text in found.items())
        if len(found) > 16 or not all(are_short):
            self.refuse(name, "up to 16 pairs of strings are required, names up to 64 characters and values up to 512")
        return found

    def tool_name(self) -> str:
        found = self.text("name")
        if not TOOL_NAME.fullmatch(found):
            self.refuse("name", "1 to 128 letters, digits, _ and - are required", _shown(found))
        return found

    def definition(self, schema: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of a tool whose parameters are under `schema`."""
        name, description = self.tool_name(), self.text("description", "")
        return {"name": name, "description": description, "parameters": self.data(schema, default)}

    def sampling(self, settings: Settings, top_k: int = 0, seed: int | None = None) -> Sampling:
        temperature = self.number("temperature", settings.temperature, 0.0, MAX_TEMPERATURE)
        top_p = self.number("top_p", 1.0, 1e-6, 1.0)
        return Sampling(temperature, top_k, top_p, random_seed() if seed is None else seed & ((1 << 63) - 1))

    def policy(self) -> str:
        """`kvfold.policy`, which names the policy that the request counts on; empty if absent."""
        own = self.object("kvfold")
        return "" if own is None else own.text("policy", "")

    def neutral(self, *tables: str) -> None:
        """Read the fields of tables of neutral_fields.toml, which have one value each that is taken."""
        for table in tables:
            self._neutral(_neutral_tables()[table])

    def _neutral(self, table: Mapping[str, Any]) -> None:
        for name, allowed in table.items():
            if "why" not in allowed:
                inside = self.object(name)
                if inside is not None:
                    inside._neutral(allowed)
                continue
            found, values = self.take(name), allowed.get("only", ())
            if found is None or any(_is_same(found, value) for value in values):
                continue
            if not values:
                self.refuse(name, f"{allowed['why']}; leave it out")
            only = " or ".join(map(json.dumps, values))
            but = "" if isinstance(found, list | dict) else _shown(found)
            self.refuse(name, f"only {only} is supported", but, allowed["why"])

    def end(self) -> None:
        """Refuse unread fields, also those of objects in it."""
        for inside in self._inside:
            inside.end()
        for name in self._left:
            allowed = ", ".join(dict.fromkeys(self._taken))
            self.refuse(name[:80], f"the field is not supported here; supported: {allowed}")


def check_names(tools: Iterable[Fields], names: Iterable[str]) -> None:
    """Names of tools are unique."""
    seen: dict[str, str] = {}
    for tool, name in zip(tools, names, strict=True):
        if name in seen:
            raise bad_request(f'{tool.path("name")}: "{name}" is the name of {seen[name]} too; give each tool its own')
        seen[name] = tool.where


def _is_same(found: object, value: object) -> bool:
    """JSON equality: 0 == 0.0, 1 != true."""
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _shown(value: object) -> str:
    """The received value, shortened."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)[:80]
    return f'"{value[:80]}"' if isinstance(value, str) else _kind(value)


def _kind(value: object) -> str:
    kinds = {type(None): "absent", str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "a number")
