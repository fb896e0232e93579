"""Which facts end when another one is stated, and which stay."""

from __future__ import annotations

import pytest

from kvfold.memory import Memory
from kvfold.memory.statement import Statement, statement_of
from kvfold.memory.supersede import NEAR_COSINE, supersedes
from tests.memory.conftest import MakeMemory

DAY = 86_400.0
ENDS = (
    ("Anna lives in Berlin.", "Anna now lives in Paris."),
    ("Anna lives in Berlin.", "Anna lives in Paris."),
    ("I live in Berlin.", "I moved to Paris last month."),
    ("I live in Berlin.", "As of May, I have moved to Paris."),
    ("Anna lives in Berlin.", "Anna no longer lives in Berlin."),
    ("Anna lives in Berlin.", "Anna doesn't live in Berlin anymore."),
    ("Anna's phone number is 555-1234.", "Anna's phone number is 777-9999."),
    ("My dog is called Rex.", "My dog is called Max."),
    ("Anna is 30 years old.", "Anna is 31 years old."),
    ("The meeting is on Monday.", "The meeting moved to Friday."),
    ("My favourite colour is green.", "My favourite colour changed to blue."),
    ("My favourite colour is green.", "Actually, my favourite colour is blue."),
    ("Anna has a dog.", "Anna no longer has a dog."),
    ("I work at Siemens.", "Since May, I work at Bosch."),
    ("I work at Siemens.", "I stopped working at Siemens."),
    ("The code of the wine cellar is 4817.", "The code of the wine cellar is now 9931."),
    ("My password is hunter2.", "Update: my password is tiger9."),
    ("Anna's wedding is on 3 May.", "Anna's wedding is on 10 June."),
)
STAYS = (
    ("Anna likes tea.", "Anna likes coffee."),
    ("Anna has a dog.", "Anna has a cat."),
    ("Anna visited Rome.", "Anna visited Oslo."),
    ("Anna lives in Berlin.", "Anna works in Berlin."),
    ("Anna lives in Berlin.", "Anna lives in Berlin, near the river."),
    ("Anna lives in Berlin.", "Ben lives in Paris."),
    ("My dog is called Rex.", "My cat is called Tom."),
    ("Anna's dog is brown.", "Anna's dog is sick."),
    ("Anna is in Berlin.", "Anna is 30 years old."),
    ("Anna is a nurse.", "Anna is Swedish."),
    ("The code of the wine cellar is 4817.", "The code of the garage is 1111."),
    ("Anna has a car.", "Anna does not have a red car."),
    ("Verdi wrote Aida.", "Verdi wrote Otello."),
)


def said(text: str) -> Statement:
    found = statement_of(text)
    assert found is not None, text
    return found


@pytest.mark.parametrize(("old", "new"), ENDS)
def test_another_value_ends_a_fact(make: MakeMemory, old: str, new: str) -> None:
    first, second = _written(make(), old, new)
    assert (first.valid_to, second.valid_to, second.supersedes) == (second.valid_from, None, first.id)


@pytest.mark.parametrize(("old", "new"), STAYS)
def test_what_may_be_true_beside_it_stays(make: MakeMemory, old: str, new: str) -> None:
    first, second = _written(make(), old, new)
    assert (first.valid_to, second.valid_to, second.supersedes) == (None, None, None)


def _written(memory: Memory, old: str, new: str) -> tuple:  # type: ignore[type-arg]
    memory.add(old, at=DAY)
    memory.add(new, at=2 * DAY)
    first, second = memory.facts()
    return first, second


def test_a_statement_has_a_subject_a_verb_and_a_value() -> None:
    found = said("Since May, Anna no longer lives in Berlin.")
    assert (found.subject, found.verb, found.values, found.is_negated) == ("anna", "live", frozenset(["berlin"]), True)
    assert said("By the way, the code of the garage is 4817.").subject == "code of the garage"
    assert (said("Lunch is at 12:30.").kind, said("I am 30.").kind, said("I am Bo.").kind) == ("day", "number", "name")
    assert statement_of("Verdi wrote Aida.") is None and statement_of("Is it?") is None and statement_of("") is None


def test_a_cosine_decides_where_words_do_not() -> None:
    old, new = said("Anna's dog is brown."), said("Anna's dog is black.")
    assert supersedes(new, old, NEAR_COSINE + 0.01) and not supersedes(new, old, NEAR_COSINE)


def test_turns_may_come_in_any_order_of_time(make: MakeMemory) -> None:
    memory = make()
    for text, day in (("I live in Oslo.", 30), ("I live in Berlin.", 10), ("I live in Paris.", 20)):
        memory.add(text, at=day * DAY)
    dates = {fact.text: (fact.valid_from / DAY, fact.valid_to and fact.valid_to / DAY) for fact in memory.facts()}
    assert dates == {"I live in Oslo.": (30, None), "I live in Berlin.": (10, 20), "I live in Paris.": (20, 30)}
    for day, city in ((15, "Berlin"), (25, "Paris"), (40, "Oslo")):
        (found,) = memory.recall("Where do I live?", at=day * DAY)
        assert city in found.fact.text


def test_what_is_said_twice_is_one_fact_until_it_ends(make: MakeMemory) -> None:
    memory = make()
    assert len(memory.add("I live in Berlin.", at=DAY)) == 1
    assert memory.add("I live in Berlin.", at=2 * DAY) == []
    memory.add("I live in Paris.", at=3 * DAY)
    assert len(memory.add("I live in Berlin.", at=4 * DAY)) == 1
    assert [fact.text for fact in memory.facts(at=5 * DAY)] == ["I live in Berlin."]
    assert len(memory.facts()) == 3


def test_what_is_said_later_counts_though_the_clock_was_set_back(
    make: MakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make()
    for seconds, said in ((1000.0, "I live in Berlin."), (970.0, "I live in Paris."), (999.0, "My dog is called Rex.")):
        monkeypatch.setattr("time.time", lambda now=seconds * 1e6: now)  # a step of 30 Ms is no correction of a clock
        memory.add(said)
    assert [fact.text for fact in memory.facts(at=1000e6)] == ["I live in Berlin.", "My dog is called Rex."]
    for seconds, said in ((2e9, "I live in Kiel."), (2e9 - 30, "I live in Rome.")):
        monkeypatch.setattr("time.time", lambda now=seconds: now)
        memory.add(said)
    for seconds in (2e9 - 30, 2e9 + 30):
        monkeypatch.setattr("time.time", lambda now=seconds: now)
        assert [one.fact.text for one in memory.recall("Where do I live?")][:1] == ["I live in Rome."]
