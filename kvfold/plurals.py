"""Numbers of things in messages: 1 fact, 2 facts, 1,200 replies."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and its noun, which is in the plural unless the number is 1."""
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
