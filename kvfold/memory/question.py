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

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = """(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?
    |nov(?:ember)?|dec(?:ember)?)"""
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"""\b(?P<when>on|in|at|of|by|before|since|after|back\ in|as\ of)?\s*(?:\bthe\s+)?(?:
        (?P<iso>\d{{4}}-\d{{2}}-\d{{2}})
        | (?P<day>{_DAY})\.?\s+(?:of\s+)?(?P<month>{_MONTH})\.?,?\s+(?P<year>\d{{4}})
        | (?P<month2>{_MONTH})\.?\s+(?P<day2>{_DAY}),?\s+(?P<year2>\d{{4}})
        | (?P<day4>\d{{1,2}})\.(?P<number4>\d{{1,2}})\.(?P<year4>\d{{4}})
        | (?P<month3>{_MONTH})\.?,?\s+(?P<year3>\d{{4}})
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
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
    day: float | None  # the last second of the day that a question about the past names, or the one before that day
    since: float | None = None  # the second from which on it asks, until now


def asked_for(question: str) -> AskedFor:
    """What a question asks; a date in one about the past is the day, and no word to look for. An impossible one, such
    as 2026-02-30, is no date."""
    found = _DATE.search(question)
    when = (found["when"] or "").lower() if found else ""
    past = _PAST | _UNTIL_NOW if when in ("since", "after") else _PAST
    if found is None or not past & set(words_of(question)):
        found = None
    text = question if found is None else question[: found.start()] + question[found.end() :]
    days = None if found is None else _days(found)
    day, since = (None, None) if days is None else _asked_time(when, *days)
    names = _names(text)
    words = [word for word in content_words(_KIND_ASKED.sub("", text)) if word not in names]
    kept = list(dict.fromkeys(words))[:_MAX_WORDS]
    return AskedFor(text, tuple(map(verb_forms, kept)), names, day, since)


def _names(question: str) -> frozenset[str]:
    """Capitalised words inside a sentence, and the first person."""
    words = [match[1] for match in _NAME.finditer(question)]
    named = {word for name in words if name[0].isupper() for word in words_of(name)} - FUNCTION_WORDS
    return frozenset(named | (FIRST_PERSON if FIRST_PERSON & set(words_of(question)) else set()))


def _asked_time(when: str, begin: float, end: float) -> tuple[float | None, float | None]:
    """The time that is asked for, and since when, of the day or month that is named."""
    if when == "since":
        return None, begin
    if when == "after":
        return None, end
    return (begin - 1e-3 if when == "before" else end), None


def _days(found: re.Match[str]) -> tuple[float, float] | None:
    """The first and last second of the day or month; None if there is none."""
    parts = {name.rstrip("234"): value for name, value in found.groupdict().items() if value is not None}
    try:
        if "iso" in parts:
            day = datetime.fromisoformat(parts["iso"]).replace(tzinfo=UTC)
        else:
            month = int(parts["number"]) if "number" in parts else _MONTHS.index(parts["month"][:3].lower()) + 1
            day = datetime(int(parts["year"]), month, int(parts.get("day", "1").rstrip("strndhSTRNDH")), tzinfo=UTC)
        after = day + timedelta(days=1)
        if not {"day", "iso"} & set(parts):
            after = (day + timedelta(days=31)).replace(day=1)
        begin, end = day.timestamp(), after.timestamp() - 1e-3
        return (begin, end) if begin > EARLIEST and end <= LATEST else None
    except (ValueError, OverflowError):
        return None
