"""Exact match, without a judge: an answer is right if it has the value, as a word, and no other one of its relation.

Where nothing answers the question, an answer is right that is empty or declines (unknown, not) without such a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfold.memory.evaluation.log import Question
from kvfold.memory.statement import statement_of

_DECLINES = re.compile(r"\b(?:unknown|not|no|none|cannot)\b|n['’]t\b", re.IGNORECASE)


def is_right(question: Question, answer: str) -> bool:
    if any(holds(answer, value) for value in question.others):
        return False
    if question.answer is None:
        return not answer.strip() or _DECLINES.search(answer) is not None
    return holds(answer, question.answer)


def extracted(texts: Sequence[str]) -> str:
    """The answer without a model: the first text, and nothing if that says what is no longer so."""
    if not texts:
        return ""
    said = statement_of(texts[0])
    return "" if said is not None and said.is_negated else texts[0]


def holds(text: str, value: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text, re.IGNORECASE) is not None
