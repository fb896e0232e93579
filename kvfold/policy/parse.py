"""The grammar of a policy expression, read by recursive descent into plain nodes; names get their meaning later.

    expression = term { "+" term }
    term       = SIZE | NAME [ "(" [ argument { "," argument } ] ")" ] | ( "prefill" | "decode" ) "(" expression ")"
    argument   = [ NAME "=" ] value
    value      = NUMBER | SIZE | PERCENT | TEXT | slice | NAME [ "(" arguments ")" ]
    slice      = [ INT ] ":" [ INT ] [ ":" [ INT ] ]
    SIZE       = NUMBER unit | ( "min" | "max" ) "(" SIZE { "," SIZE } ")"

    NUMBER  64, 0.2, -2, 1e-05      unit  x, tok, %mem, MB …    PERCENT  50%
    NAME    letters, digits and _   TEXT  anything on one line between two ", such as a file's name

Whitespace is free. Length and depth are bounded, since expressions also come over HTTP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvfold.errors import PolicyError
from kvfold.policy.parts import LayerSlice
from kvfold.policy.registry import PHASES
from kvfold.policy.size import (
    BYTE_UNITS,
    EXAMPLES,
    Bytes,
    Greatest,
    Least,
    Percent,
    Ratio,
    Share,
    Size,
    Tokens,
    number_text,
)

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


MAX_LEN = 2000
MAX_DEPTH = 8
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Call:
    """`snapkv(window=32)`, or a bare name."""

    name: str
    arguments: tuple[Argument, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})" if self.arguments else self.name


Value = int | float | str | Size | Percent | LayerSlice | Call


@dataclass(frozen=True)
class Argument:
    keyword: str | None
    value: Value

    def __str__(self) -> str:
        text = f'"{self.value}"' if isinstance(self.value, str) else str(self.value)
        text = number_text(self.value) if isinstance(self.value, int | float) else text
        return text if self.keyword is None else f"{self.keyword}={text}"


@dataclass(frozen=True)
class Phase:
    """`prefill(...)` or `decode(...)`."""

    name: str
    terms: tuple[Call | Size, ...]

    def __str__(self) -> str:
        return f"{self.name}({' + '.join(map(str, self.terms))})"


def parse(text: str) -> tuple[Call | Size | Phase, ...]:
    """The terms of an expression, in order."""
    if len(text) > MAX_LEN:
        raise PolicyError(f"an expression has at most {MAX_LEN} characters, this one has {len(text)}")
    return _Parser(tokens(text)).expression()


def parse_value(text: str) -> Value:
    """The value of one argument, such as `4x` or `fixed(200)`."""
    if len(text) > MAX_LEN:
        raise PolicyError(f"a value has at most {MAX_LEN} characters, this one has {len(text)}")
    return _Parser(tokens(text)).value()


def _spelt(token: Token) -> str:
    """A size as other libraries write it, in ours: kvpress' compression_ratio is the share that is evicted."""
    if isinstance(token.value, Percent) and 0 < token.value.percent < 100:
        return f"for {token.text} of the bytes write {token.text}mem; "
    if isinstance(token.value, float) and 0 < token.value < 1:
        ratio = number_text(round(1 / (1 - token.value), 2))
        return f"for a compression_ratio of {token.text}, as kvpress counts, write {ratio}x; "
    return f"did you mean {token.text}x or {token.text}tok? " if isinstance(token.value, int) else ""


class _Parser:
    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._at = 0
        self._depth = 0

    def expression(self) -> tuple[Call | Size | Phase, ...]:
        terms = self._list(self._term, "+")
        if self._peek().kind != "end":
            raise self._unexpected("+ and another term")
        return terms

    def value(self) -> Value:
        found = self._value()
        if self._peek().kind != "end":
            raise self._unexpected("one value")
        return found

    def _term(self) -> Call | Size | Phase:
        if self._peek().text in PHASES and self._peek(1).text == "(":
            name = self._next().text
            return Phase(name, self._within(lambda: self._list(lambda: self._phase_term(name), "+")))
        return self._phase_term("an expression")

    def _phase_term(self, where: str) -> Call | Size:
        token = self._peek()
        if token.kind in ("number", "percent"):
            raise PolicyError(f'"{token.text}" is no size; {_spelt(token)}sizes: {EXAMPLES}')
        if token.text in PHASES and where in PHASES:
            raise PolicyError(f"{token.text}(...) cannot stand inside {where}(...); write the two side by side")
        if token.kind not in ("size", "name"):
            raise self._unexpected(f"a term of {where}")
        return self._size() if self._starts_size() else self._call()

    def _call(self) -> Call:
        name = self._next().text
        return Call(name, self._within(self._arguments) if self._peek().text == "(" else ())

    def _arguments(self) -> tuple[Argument, ...]:
        return () if self._peek().text == ")" else self._list(self._argument, ",")

    def _argument(self) -> Argument:
        if self._peek().kind == "name" and self._peek(1).text == "=":
            keyword = self._next().text
            self._next()
            return Argument(keyword, self._value())
        return Argument(None, self._value())

    def _value(self) -> Value:
        token = self._peek()
        if ":" in (token.text, self._peek(1).text) and token.kind in ("number", "mark"):
            return self._slice()
        if isinstance(token.value, int | float | Percent):
            self._next()
            return token.value
        if token.kind == "text":
            return self._next().text[1:-1]
        if token.kind not in ("size", "name"):
            raise self._unexpected("a value")
        return self._size() if self._starts_size() else self._call()

    def _slice(self) -> LayerSlice:
        bounds: list[int | None] = [self._bound()]
        while self._peek().text == ":" and len(bounds) < 3:
            self._next()
            bounds.append(self._bound())
        return LayerSlice(*bounds)

    def _bound(self) -> int | None:
        if self._peek().kind != "number":
            return None
        token = self._next()
        if not isinstance(token.value, int):
            raise PolicyError(f"{token.text} cannot bound a slice; write whole numbers, such as 2:-2")
        return token.value

    def _starts_size(self) -> bool:
        return self._peek().kind == "size" or (self._peek().text in ("min", "max") and self._peek(1).text == "(")

    def _size(self) -> Size:
        token = self._next()
        if isinstance(token.value, Size):
            return token.value
        parts = self._within(lambda: self._list(self._part, ","))
        return Least(parts) if token.text == "min" else Greatest(parts)

    def _part(self) -> Size:
        if not self._starts_size():
            raise self._unexpected(f"a size ({EXAMPLES})")
        return self._size()

    def _list(self, item: Callable[[], _Item], mark: str) -> tuple[_Item, ...]:
        items = [item()]
        while self._peek().text == mark:
            self._next()
            items.append(item())
        return tuple(items)

    def _within(self, inner: Callable[[], _Item]) -> _Item:
        """What stands between two parentheses."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PolicyError(f"parentheses are nested more than {MAX_DEPTH} deep")
        self._next()
        found = inner()
        if self._peek().text != ")":
            raise self._unexpected('")"')
        self._next()
        self._depth -= 1
        return found

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _unexpected(self, wanted: str) -> PolicyError:
        token = self._peek()
        found = token.text if token.kind == "end" else f'"{token.text}"'
        return PolicyError(f"expected {wanted}, found {found}")
