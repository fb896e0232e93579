"""Terms and their arguments in the words of the language, as an expression would write them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kvfold.policy.registry import term_of
from kvfold.policy.size import Percent, number_text

_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def literal(value: Any, defaults: bool = False) -> str:
    """An argument's value in the words of the language; a term in its short form or, with `defaults`, its full one."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        return term_text(value, defaults)
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, Percent):
        return str(value)
    return value if _WORD.fullmatch(value) else f'"{value}"'


def term_text(variant: Any, defaults: bool) -> str:
    """`snapkv(window=32)`; with `defaults` all arguments, else those that differ."""
    return call_text(term_of(variant).name, given_arguments(variant, defaults))


def given_arguments(variant: Any, defaults: bool) -> list[str]:
    fields = [field for field in term_of(variant).arguments if field.init]
    values = [(field, getattr(variant, field.name)) for field in fields]
    if not defaults and term_of(variant).name == "protect" and not any(value for _, value in values):
        return ["none"]
    return [_argument(field, value, defaults) for field, value in values if defaults or value != field.default]


def _argument(field: dataclasses.Field[Any], value: Any, defaults: bool) -> str:
    """`size=20`; a term needs no keyword where one would leave it out: `chunk(keydiff)`."""
    text = literal(value, defaults)
    return text if dataclasses.is_dataclass(value) and not defaults else f"{field.name}={text}"


def call_text(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})" if arguments else name
