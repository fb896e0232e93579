"""Dates as people write them (ISO 8601, UTC where no zone is named), and seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from kvfold.errors import InputError

_EARLIEST, _LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
_DAY = timedelta(days=1)


def parse_date(text: str, *, is_end: bool = False) -> float:
    """Seconds since 1970; a day without a time is its first second, with `is_end` its last microsecond."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(f'"{text}" is no date; write for example 2026-03-01 or 2026-03-01T09:30') from None
    found = found.replace(tzinfo=found.tzinfo or UTC)
    if not _EARLIEST <= found <= _LATEST:
        raise InputError(f'"{text}" is no date that can be kept; write one from year 1 to 9999')
    if is_end and len(text.strip()) <= len("2026-03-01"):
        found += _DAY - timedelta(microseconds=1)
    return found.timestamp()


def date_text(seconds: float) -> str:
    """2026-03-01T09:30:00+00:00, exactly enough to be read back."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def day_text(seconds: float) -> str:
    """2026-03-01, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
