"""How replies are matched with short answers: substrings, and the first or last number of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")
_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"[0-9]+\.[0-9]+|[0-9]+")
_MARKS = re.compile(r"""[\n:"'.,?!{}]""")


def match_all(answers: Sequence[str], reply: str) -> float:
    """RULER's string_match_all: the share of answers that occur in the reply, in whatever case."""
    return sum(_occurs(answer, reply) for answer in answers) / len(answers)


def match_part(answers: Sequence[str], reply: str) -> float:
    """RULER's string_match_part: whether any of the answers occurs in the reply, in whatever case."""
    return float(any(_occurs(answer, reply) for answer in answers))


def first_digits(reply: str) -> str:
    """InfiniteBench's first integer, as written: leading zeros count."""
    found = _DIGITS.search(reply)
    return found[0] if found else ""


def last_digits(reply: str) -> str:
    found: list[str] = _DIGITS.findall(reply)
    return found[-1] if found else ""


def first_number(reply: str) -> float | None:
    """InfiniteBench's first integer or decimal."""
    found = _NUMBER.search(reply)
    return float(found[0]) if found else None


def split_words(reply: str) -> list[str]:
    """InfiniteBench's words: parted by blanks and by the marks that answers are wrapped in."""
    return _MARKS.sub(" ", reply).split()


def _occurs(answer: str, reply: str) -> bool:
    return answer.lower() in _CONTROL.sub("\n", reply).lower()
