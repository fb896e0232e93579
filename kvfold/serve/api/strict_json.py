"""Strict JSON decoding of request bodies and tool calls: what passes can be encoded and rendered again.

Python's decoder accepts more than RFC 8259 (NaN, Infinity) and more than other programs can hold: lone surrogates,
numbers beyond a double, nesting that overflows the next program's stack, and duplicate keys (the last value wins).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

Json = dict[str, Any]  # an object

MAX_DEPTH = 100
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
MAX_DIGITS = 308  # of a double's largest power of ten
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")  # the decoder joins pairs, so what is left is a lone surrogate


class InvalidJson(ValueError):
    """`where`: path of the invalid value, or empty."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


def parse_json(raw: bytes | bytearray | str) -> Any:
    """The decoded value; InvalidJson if it is no JSON, or none that can be re-encoded."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        found = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise InvalidJson(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise InvalidJson(_TOO_DEEP) from None
    _check_depth(found)
    if _ESCAPED_HALF.search(text):
        _check_texts(found, "")
    return found


def _check_depth(value: object) -> None:
    """Breadth first: recursion could overflow the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for _, item in _inside(outer) if isinstance(item, dict | list)]
        if not level:
            return
    raise InvalidJson(_TOO_DEEP)


def _check_texts(value: object, where: str) -> None:
    if isinstance(value, str) and (half := _HALF.search(value)):
        raise InvalidJson(f"the text holds half of a surrogate pair ({half[0]}); send whole characters", where)
    for name, item in _inside(value):
        path = f"{where}.{name}" if where else str(name)
        _check_texts(name, path)
        _check_texts(item, path)


def _inside(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _float(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _no_number(text)


def _int(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= MAX_DIGITS else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise InvalidJson(f"{text[:20]} is no number that a double can hold")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidJson(f'the key "{twice[:80]}" comes twice in one object')
    return found


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_no_number, object_pairs_hook=_object)
