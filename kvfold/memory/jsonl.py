"""Facts as JSON lines: what `kvfold memory export` writes, and what `kvfold memory import` reads back.

A line that is no fact is refused with its number, and nothing is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvfold.errors import InputError
from kvfold.memory.dates import parse_date
from kvfold.memory.extract import clean
from kvfold.memory.fact import MAX_IMPORTANCE, MAX_NAME, MAX_TEXT, Fact

_MAX_NUMBER = 1 << 53


def to_lines(facts: Iterable[Fact]) -> str:
    return "".join(json.dumps(fact.to_json(), ensure_ascii=False) + "\n" for fact in facts)


def from_lines(text: str, user: str) -> list[Fact]:
    """The facts of an export, for a user, with the ids it had; vectors are made anew."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    facts: dict[int, Fact] = {}
    for number, line in lines:
        fact = _fact(number, line, user)
        if fact.id in facts:
            raise InputError(f"line {number} has the id {fact.id} of an earlier line; nothing was imported")
        facts[fact.id] = fact
    return list(facts.values())


def _fact(number: int, line: str, user: str) -> Fact:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        start, end = (_count(value) for value in found["span"])
        if start > end:
            raise ValueError("its span ends before it begins")
        valid_from = parse_date(_text(found["valid_from"], 64))
        valid_to = None if found["valid_to"] is None else parse_date(_text(found["valid_to"], 64))
        if valid_to is not None and valid_to < valid_from:
            raise ValueError("it ends before it begins")
        importance = found["importance"]
        if type(importance) not in (int, float) or not 0 < importance <= MAX_IMPORTANCE:
            raise ValueError(f"importance is {importance!r}")
        said, source = _text(found["text"], MAX_TEXT), _text(found["source"], MAX_NAME)
        if not said.strip():
            raise ValueError("its text is empty")
        uses, its_id = _count(found["uses"]), _count(found["id"])
        before = None if found["supersedes"] is None else _count(found["supersedes"])
        if before == its_id:
            raise ValueError("it supersedes itself")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)[:120]
        raise InputError(f"line {number} is no fact of kvfold memory export ({why}); nothing was imported") from None
    return Fact(its_id, user, said, source, start, end, valid_from, valid_to, float(importance), uses, before)


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"no text of at most {most} characters")
    return clean(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError("no count")
    return int(value)
