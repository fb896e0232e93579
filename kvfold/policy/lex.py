"""The words of a policy expression: numbers, sizes, names, quoted text and marks.

NUMBER   64, 0.2, -2, 1e-05
SIZE     a number and a unit: 8x, 2048tok, 12.5%mem, 512MB
PERCENT  50%
NAME     letters, digits and _
TEXT     anything on one line between two ", such as a file's name
mark     one of + ( ) , = :
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from kvfold.errors import PolicyError
from kvfold.policy.size import BYTE_UNITS, EXAMPLES, Bytes, Percent, Ratio, Share, Size, Tokens, number_text

_MAX_DIGITS = 18
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) (?P<unit>\s*%?\s*[A-Za-z_]\w*|\s*%)?
      | (?P<name>[A-Za-z_]\w*)
      | (?P<text>"[^"\n]*")
      | (?P<mark>[+(),=:])
    )""",
    re.VERBOSE | re.ASCII,
)


class Token(NamedTuple):
    kind: str  # "number", "size", "percent", "name", "text" (with its quotation marks), "mark" or "end"
    text: str
    value: int | float | Size | Percent | None = None


def tokens(text: str) -> list[Token]:
    """The words of a text, and one that marks its end."""
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise PolicyError(f'"{text[at:].strip()[0]}" is no part of an expression; join terms with +')
        found.append(_token(match))
        at = match.end()
    return [*found, Token("end", "the end")]


def _token(match: re.Match[str]) -> Token:
    if match["number"] is None:
        kind = next(kind for kind in ("name", "text", "mark") if match[kind] is not None)
        return Token(kind, match[kind])
    number, unit = _number(match["number"]), "".join((match["unit"] or "").split())
    if not unit:
        return Token("number", match["number"], number)
    if unit == "%":
        return Token("percent", match["number"] + unit, Percent(float(number)))
    return Token("size", match["number"] + unit, _size(number, unit))


def _number(text: str) -> int | float:
    number = int(text) if text.lstrip("-").isdigit() and len(text) <= _MAX_DIGITS else float(text)
    if not math.isfinite(number) or abs(number) >= 10**_MAX_DIGITS:
        raise PolicyError(f"{text[:24]} is too large; numbers stay below 1e{_MAX_DIGITS}")
    return number


def _size(number: int | float, unit: str) -> Size:
    if unit in BYTE_UNITS:
        return Bytes.of(number, unit)
    if unit == "tok":
        return Tokens(number)  # type: ignore[arg-type]  # it refuses what is not whole
    relative: dict[str, Callable[[float], Size]] = {"x": Ratio, "%mem": Share}
    if unit not in relative:
        near = next((known for known in (*relative, "tok", *BYTE_UNITS) if known.lower() == unit.lower()), None)
        if near is not None:
            raise PolicyError(f'"{number_text(number)}{unit}" is no size; write {number_text(number)}{near}')
        raise PolicyError(f'"{number_text(number)}{unit}" is no size; sizes: {EXAMPLES}')
    return relative[unit](float(number))
