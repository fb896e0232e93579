"""Questions of the user's own, for a memory that is there: JSON lines with a question, its answer, and a day.

{"question": "Where do I live?", "answer": "Paris"}
{"question": "Where did I live?", "answer": "Berlin", "at": "2026-02-01"}
{"question": "What is my shoe size?", "answer": null}
"""

from __future__ import annotations

import json

from kvfold.errors import InputError
from kvfold.memory.dates import parse_date
from kvfold.memory.evaluation.log import Kind, Question


def read_questions(text: str) -> list[Question]:
    """InputError names the first line that is none."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_question(number, line))
    if not found:
        raise InputError(
            'there are no questions; write lines such as {"question": "Where do I live?", "answer": "Paris"}'
        )
    return found


def _question(number: int, line: str) -> Question:
    try:
        given = json.loads(line)
        asked, answer, at = given["question"], given["answer"], given.get("at")
        if not isinstance(asked, str) or not isinstance(answer, str | None) or not isinstance(at, str | None):
            raise TypeError("question and at are texts, answer is a text or null")
        day = None if at is None else parse_date(at, is_end=True)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InputError(f'line {number} is no {{"question", "answer"}} of JSON ({str(error)[:80]})') from None
    kind: Kind = "unknown" if answer is None else "current" if day is None else "past"
    return Question(asked, kind, answer, (), day)
