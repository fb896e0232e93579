"""What a question asks: the words that a fact must hold, of whom it speaks, and of which day.

The kind of the answer, which a fact need not name, is left out.

    Where did Anna live on 2026-03-10?    words live    names anna     day 2026-03-10
    Which company do I work for?          words work    names i, my    kind company
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kvfold.memory.dates import EARLIEST, LATEST
from kvfold.memory.verbs import verb_forms
from kvfold.memory.words import FUNCTION_WORDS, content_words
from kvfold.shortening.word_index import words_of

_MONTH = "january|february|march|april|may|june|july|august|september|october|november|december"
_DATE = re.compile(
    rf"""\b(?:on|in|at|of|by|back\ in|as\ of)?\s*(?:
        (?P<iso>\d{{4}}-\d{{2}}-\d{{2}})
        | (?P<day>\d{{1,2}})\.?\s+(?P<month>{_MONTH})\s+(?P<year>\d{{4}})
        | (?P<month2>{_MONTH})\s+(?P<day2>\d{{1,2}}),?\s+(?P<year2>\d{{4}})
        | (?P<month3>{_MONTH})\s+(?P<year3>\d{{4}})
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_PAST = frozenset(["did", "was", "were", "had", "used"])
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
    day: float | None  # the last second of the day that a question about the past names


def asked_for(question: str) -> AskedFor:
    """What a question asks; a date in one about the past is the day, and no word to look for."""
    found = _DATE.search(question)
    day = _last_second(found) if found and _PAST & set(words_of(question)) else None
    text = question if found is None or day is None else question[: found.start()] + question[found.end() :]
    names = _names(text)
    words = [word for word in content_words(_KIND_ASKED.sub("", text)) if word not in names]
    kept = list(dict.fromkeys(words))[:_MAX_WORDS]
    return AskedFor(text, tuple(map(verb_forms, kept)), names, day)


def _names(question: str) -> frozenset[str]:
    """Capitalised words inside a sentence, and the first person."""
    words = [match[1] for match in _NAME.finditer(question)]
    named = {word for name in words if name[0].isupper() for word in words_of(name)} - FUNCTION_WORDS
    return frozenset(named | (FIRST_PERSON if FIRST_PERSON & set(words_of(question)) else set()))


def _last_second(found: re.Match[str]) -> float | None:
    parts = {name.rstrip("23"): value for name, value in found.groupdict().items() if value is not None}
    try:
        if "iso" in parts:
            day = datetime.fromisoformat(parts["iso"]).replace(tzinfo=UTC)
        else:
            month = _MONTH.split("|").index(parts["month"].lower()) + 1
            day = datetime(int(parts["year"]), month, int(parts.get("day", 1)), tzinfo=UTC)
            if "day" not in parts:  # the last day of the month
                day = (day + timedelta(days=31)).replace(day=1) - timedelta(days=1)
        end = (day + timedelta(days=1) - timedelta(milliseconds=1)).timestamp()
        return end if EARLIEST <= end <= LATEST else None
    except (ValueError, OverflowError):
        return None
