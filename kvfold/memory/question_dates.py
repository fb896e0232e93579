"""Dates that a question names, and the time that it asks for.

    on 2 April 2026                    at the end of that day
    in spring 2024                     at the end of May 2024
    before April 2026                  at the end of March 2026
    since 2026-04-02                   from then until now
    between May 2025 and April 2026    from the first second of May to the last of April

An impossible day, such as 2026-02-30, is a date without a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kvfold.memory.dates import EARLIEST, LATEST

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_SEASONS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}  # first months, in the north
_MONTH = """(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?
    |nov(?:ember)?|dec(?:ember)?)"""
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"""\b(?P<when>on|in|at|of|by|before|since|after|back\ in|as\ of|during|between|from|to|until|till|and|or)?
    \s*(?:\bthe\s+)?(?:
        (?P<iso>\d{{4}}-\d{{2}}-\d{{2}})
        | (?P<day>{_DAY})\.?\s+(?:of\s+)?(?P<month>{_MONTH})\.?,?\s+(?P<year>\d{{4}})
        | (?P<month2>{_MONTH})\.?\s+(?P<day2>{_DAY}),?\s+(?P<year2>\d{{4}})
        | (?P<day4>\d{{1,2}})\.(?P<number4>\d{{1,2}})\.(?P<year4>\d{{4}})
        | (?P<month3>{_MONTH})\.?,?\s+(?P<year3>\d{{4}})
        | (?P<season>{"|".join(_SEASONS)})(?:\s+of)?,?\s+(?P<year5>\d{{4}})
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_MOMENT = 1e-3  # seconds


@dataclass(frozen=True)
class NamedDate:
    """Characters `start` to `end` of a question, and the first and last second that they name."""

    start: int
    end: int
    when: str  # the word before the date
    period: tuple[float, float] | None

    @property
    def is_start(self) -> bool:
        return self.when in ("since", "after")


def named_dates(question: str) -> list[NamedDate]:
    """All dates of a question, in their order."""
    return [
        NamedDate(*found.span(), (found["when"] or "").lower(), _period(found)) for found in _DATE.finditer(question)
    ]


def without(question: str, dates: Sequence[NamedDate]) -> str:
    """The question without these dates and the words before them."""
    for date in reversed(dates):
        question = question[: date.start] + question[date.end :]
    return question


def asked_time(dates: Sequence[NamedDate]) -> tuple[float | None, float | None]:
    """The time that is asked for, and since when; of several dates from the first to the last, in whichever order."""
    starts, times = list[float](), list[tuple[float, float]]()
    for date in dates:
        if date.period is not None:
            begin, end = date.period
            if date.is_start:
                starts.append(begin if date.when == "since" else end)
            else:
                times.append((begin - _MOMENT, begin - _MOMENT) if date.when == "before" else date.period)
    if not starts and len(times) > 1:
        starts = [begin for begin, _ in times]
    return max((end for _, end in times), default=None), min(starts, default=None)


def _period(found: re.Match[str]) -> tuple[float, float] | None:
    """The first and last second of the day, month or season; None if there is none."""
    parts = {name.rstrip("2345"): value for name, value in found.groupdict().items() if value is not None}
    try:
        if "iso" in parts:
            begin = datetime.fromisoformat(parts["iso"]).replace(tzinfo=UTC)
        else:
            day = int(parts.get("day", "1").rstrip("strndhSTRNDH"))
            begin = datetime(int(parts["year"]), _month(parts), day, tzinfo=UTC)
        after = begin + timedelta(days=1)
        if not {"day", "iso"} & set(parts):
            after = (begin + timedelta(days=92 if "season" in parts else 31)).replace(day=1)
        first, last = begin.timestamp(), after.timestamp() - _MOMENT
        return (first, last) if first > EARLIEST and last <= LATEST else None
    except (ValueError, OverflowError):
        return None


def _month(parts: dict[str, str]) -> int:
    if "season" in parts:
        return _SEASONS[parts["season"].lower()]
    return int(parts["number"]) if "number" in parts else _MONTHS.index(parts["month"][:3].lower()) + 1
