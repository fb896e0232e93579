"""Fields of a JSON object, taken one by one with their types; what nobody took is refused by name.

A field that is null counts as absent. Nothing is ever accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from kvfold.serve.api_error import bad_request


class Fields:
    """`where` is the path of the object in the request, empty at its top."""

    def __init__(self, data: object, where: str = "") -> None:
        self.where = where
        if not isinstance(data, dict):
            raise bad_request(f"{where or 'the body'} is {_kind(data)}; it must be an object")
        self._left: dict[str, Any] = {name: value for name, value in data.items() if value is not None}
        self._taken: list[str] = []

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        return name in self._left

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise bad_request(f"{self.path(name)}: {reason}")

    def take(self, name: str) -> Any:
        """Whatever it is; None if it is absent."""
        self._taken.append(name)
        return self._left.pop(name, None)

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

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else self.take(name)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            self.refuse(name, f"a whole number from {low} to {high} is required, not {found!r}"[:200])
        return found

    def number(self, name: str, default: float, low: float, high: float) -> float:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool) or not low <= found <= high:
            self.refuse(name, f"a number from {low:g} to {high:g} is required, not {found!r}"[:200])
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.take(name)
        found = default if found is None else found
        if not isinstance(found, bool):
            self.refuse(name, f"true or false is required, not {_kind(found)}")
        return found

    def choice(self, name: str, allowed: Iterable[str], default: str | None = None) -> str:
        found, names = self.text(name, default), list(allowed)
        if found not in names:
            self.refuse(name, f'"{found[:80]}" is not supported; supported: {", ".join(names)}')
        return found

    def items(self, name: str) -> list[Any]:
        """A list; empty if it is absent."""
        found = self.take(name)
        if found is None:
            return []
        if not isinstance(found, list):
            self.refuse(name, f"a list is required, not {_kind(found)}")
        return found

    def texts(self, name: str, most: int) -> list[str]:
        """Non-empty strings; a single string counts as a list of one."""
        found = self.take(name)
        found = [] if found is None else [found] if isinstance(found, str) else found
        if not isinstance(found, list) or len(found) > most or not all(isinstance(x, str) and x for x in found):
            self.refuse(name, f"up to {most} non-empty strings are required")
        return found

    def object(self, name: str) -> Fields | None:
        found = self.take(name)
        return None if found is None else Fields(found, self.path(name))

    def end(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            allowed = ", ".join(dict.fromkeys(self._taken))
            self.refuse(name[:80], f"the field is not supported here; supported: {allowed}")


def _kind(value: object) -> str:
    kinds = {type(None): "absent", str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "a number")
