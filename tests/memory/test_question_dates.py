"""Dates in questions: which time is asked for, and that it is no word to look for."""

from __future__ import annotations

import pytest

from kvfold.memory.dates import parse_date
from kvfold.memory.question import asked_for
from kvfold.memory.question_dates import asked_time, named_dates
from tests.memory.conftest import MakeMemory


@pytest.mark.parametrize(
    "day", ["on 0001-01-01", "on 9999-12-31", "in December 9999", "in January 0001", "on 0000-12-31"]
)
def test_a_question_may_name_a_day_beyond_all_dates(make: MakeMemory, day: str) -> None:
    memory = make()
    memory.add("I live in Berlin.")
    assert len(memory.recall(f"Where did I live {day}?", abstain=False)) <= 1


@pytest.mark.parametrize(
    ("when", "cities"),
    [
        ("before 2026-03-01", ["Rome"]),
        ("before March 2026", ["Rome"]),
        ("before 2026-05-01", ["Bern"]),
        ("since 2026-02-01", ["Bern", "Oslo", "Rome"]),
        ("since 2026-03-01", ["Bern", "Oslo"]),
        ("after March 2026", ["Bern", "Oslo"]),
        ("on 2026-03-01", ["Bern"]),
        ("on March 31st, 2026", ["Bern"]),
        ("on the 2nd of April 2026", ["Bern"]),
        ("on 2 Apr 2026", ["Bern"]),
        ("on Apr. 2, 2026", ["Bern"]),
        ("on 02.04.2026", ["Bern"]),
        ("on 1 Feb 2026", ["Rome"]),
        ("in Sept 2026", ["Oslo"]),
        ("in April 2026", ["Bern"]),
        ("on 2026-02-30", ["Oslo"]),
        ("on 31.02.2026", ["Oslo"]),
        ("in spring 2026", ["Oslo"]),
        ("in the winter of 2025", ["Rome"]),
        ("before summer 2026", ["Oslo"]),
        ("before spring 2026", ["Rome"]),
        ("since Fall 2026", ["Oslo"]),
        ("between 2026-01-05 and 2026-03-01", ["Bern", "Rome"]),
        ("between 1 March 2026 and 30 April 2026", ["Bern"]),
        ("from January to 2026-02-01", ["Rome"]),
        ("from May 2026 to March 2026", ["Bern", "Oslo"]),
        ("on 2026-02-01 and on 2026-06-01", ["Bern", "Oslo", "Rome"]),
        ("after 2026-03-15 and before 2026-04-15", ["Bern"]),
        ("since April 2026 until 2026-04-20", ["Bern"]),
        ("on 2026-02-30 or on 2026-02-01", ["Rome"]),
    ],
)
def test_times_of_the_past_as_people_write_them(make: MakeMemory, when: str, cities: list[str]) -> None:
    memory = make()
    for city, day in (("Rome", "2026-01-01"), ("Bern", "2026-03-01"), ("Oslo", "2026-05-01")):
        memory.add(f"I live in {city}.", at=parse_date(day))
    found = memory.recall(f"Where did I live {when}?", now=parse_date("2026-11-01"))
    assert sorted(one.fact.text for one in found) == [f"I live in {city}." for city in cities]


@pytest.mark.parametrize(
    ("named", "first", "last"),
    [
        ("spring 2024", "2024-03-01", "2024-05-31"),
        ("Summer of 2024", "2024-06-01", "2024-08-31"),
        ("autumn, 2024", "2024-09-01", "2024-11-30"),
        ("fall 2024", "2024-09-01", "2024-11-30"),
        ("winter 2023", "2023-12-01", "2024-02-29"),
        ("winter 2024", "2024-12-01", "2025-02-28"),
    ],
)
def test_a_season_has_three_months(named: str, first: str, last: str) -> None:
    (date,) = named_dates(f"Where was I in {named}?")
    assert date.period == (parse_date(first), parse_date(last, is_end=True))


def test_dates_are_no_words_to_look_for() -> None:
    asked = asked_for("Where have I lived between spring 2024 and 2 May 2025?")
    assert asked.text.split() == ["Where", "have", "I", "lived", "?"] and len(asked.words) == 1
    assert (asked.since, asked.day) == (parse_date("2024-03-01"), parse_date("2025-05-02", is_end=True))
    assert asked_for("Is the concert in spring 2024 or on 2024-07-01?").since is None, "not about the past"
    assert asked_time(named_dates("Where did I live in 2024?")) == (None, None)
