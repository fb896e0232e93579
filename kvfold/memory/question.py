"""What a question asks: the words that a fact must hold, of whom it speaks, and of which day.

The kind of the answer, which a fact need not name, is left out.

    Where did Anna live on 2026-03-10?    words live    names anna     day 2026-03-10
    Which company do I work for?          words work    names i, my    kind company
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvfold.memory.question_dates import asked_time, named_dates, without
from kvfold.memory.verbs import verb_forms
from kvfold.memory.words import FUNCTION_WORDS, content_words
from kvfold.shortening.word_index import words_of

_PAST = frozenset(["did", "was", "were", "had", "used"])
_UNTIL_NOW = frozenset(["have", "has", "been"])  # also about the past, where a day is named since which
_KIND_ASKED = re.compile(
    r"\b(?:which|what)\s+(\w+)\s+(?=(?:am|is|are|was|were|do|does|did|has|have|had|will|can)\b)", re.I
)
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b([^\W\d_]\w*?)(?:['’]s)?\b")
_MAX_WORDS = 64  # of a question that are looked up
FIRST_PERSON = frozenset(words_of("i me my mine we us our ours myself"))
THIRD_PERSON = frozenset(words_of("he she it they him her them his its their"))


@dataclass(frozen=True)
class AskedFor:
    """`words`: what it asks, each in all forms that say the same. `names`: of whom; empty: of nobody by name."""

    text: str
    words: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    day: float | None  # the last second of the time that a question about the past names, or the one before it
    since: float | None = None  # the second from which on it asks, until that day or now


def asked_for(question: str) -> AskedFor:
    """What a question asks; dates in one about the past are its time, and no words to look for."""
    found = named_dates(question)
    past = _PAST | _UNTIL_NOW if len(found) > 1 or any(date.is_start for date in found) else _PAST
    if not past & set(words_of(question)):
        found = []
    text = without(question, found)
    day, since = asked_time(found)
    names = _names(text)
    words = [word for word in content_words(_KIND_ASKED.sub("", text)) if word not in names]
    kept = list(dict.fromkeys(words))[:_MAX_WORDS]
    return AskedFor(text, tuple(map(verb_forms, kept)), names, day, since)


def _names(question: str) -> frozenset[str]:
    """Capitalised words inside a sentence, and the first person."""
    words = [match[1] for match in _NAME.finditer(question)]
    named = {word for name in words if name[0].isupper() for word in words_of(name)} - FUNCTION_WORDS
    return frozenset(named | (FIRST_PERSON if FIRST_PERSON & set(words_of(question)) else set()))
