"""Dates as people write them (ISO 8601, UTC where no zone is named), and seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime

from kvfold.errors import InputError

EARLIEST, LATEST = (datetime(*day, tzinfo=UTC).timestamp() for day in ((1, 1, 2), (9999, 12, 30)))  # that can be shown
_DAY_SECONDS = 86_400.0


def parse_date(text: str, *, is_end: bool = False) -> float:
    """Seconds since 1970; a day without a time is its first second, with `is_end` its last millisecond."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(f'"{text}" is no date; write for example 2026-03-01 or 2026-03-01T09:30') from None
    found = found.replace(tzinfo=found.tzinfo or UTC)
    is_day = len(text.strip()) <= len("2026-03-01")
    more = _DAY_SECONDS - 1e-3 if is_end and is_day else 0.0
    return checked_time(found.timestamp() + more)


def checked_time(seconds: float) -> float:
    """To the microsecond, as dates tell it; InputError for a time that no date shows."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise InputError(f"a time is {str(seconds)[:40]!r}; give seconds since 1970, such as parse_date gives")
    if not EARLIEST <= seconds <= LATEST:
        raise InputError(f"a time is {seconds:g} seconds from 1970; write one of the years 2 to 9998")
    return round(float(seconds), 6)


def date_text(seconds: float) -> str:
    """2026-03-01T09:30:00+00:00, exactly enough to be read back."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def day_text(seconds: float) -> str:
    """2026-03-01, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
