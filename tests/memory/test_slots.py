"""An update of the bank rewrites few slots, those that it is about, and leaves every byte of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.memory import Fact
from kvfold.memory.bank import Bank
from kvfold.memory.slots import Slot, changed_share, render_bank, tfidf_scores, updated
from tests.memory.conftest import MakeMemory

DAY = 86_400.0
WORDS = ["red", "house", "river", "opera", "Anna", "lives", "violin", "4817"]


def fact(number: int, text: str, supersedes: int | None = None) -> Fact:
    return Fact(number, "anna", text, "", 0, len(text), DAY * number, supersedes=supersedes)


def test_worked_example() -> None:
    """The slot that is hit most is one that every background batch hits, so another comes first."""
    scores = tfidf_scores([6, 3, 1, 0], [999, 9, 0, 4], 1000)
    assert [round(float(score), 4) for score in scores] == [0.0006, 1.3819, 0.6909, 0.0]
    assert tfidf_scores([6, 3, 1, 0], [999, 9, 0, 4], 1000, has_idf=False).argmax() == 0


SENTENCES = st.lists(st.sampled_from(WORDS), min_size=2, max_size=5).map(" ".join)
BANKS = st.lists(st.one_of(st.none(), SENTENCES), min_size=1, max_size=12)


@given(BANKS, st.lists(st.tuples(SENTENCES, st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 6), st.data())
def test_all_slots_but_the_best_stay_byte_identical(
    texts: list[str | None], new: list[tuple[str, int]], top: int, data: st.DataObject
) -> None:
    bank = [Slot() if text is None else Slot(number + 1, f"- {text}") for number, text in enumerate(texts)]
    facts = [fact(100 + number, text, before or None) for number, (text, before) in enumerate(new)]
    uses = data.draw(st.dictionaries(st.integers(1, 12), st.integers(0, 40)))
    after = updated(bank, facts, uses, data.draw(st.integers(0, 30)), top)
    changed = [row for row, (one, other) in enumerate(zip(bank, after, strict=True)) if one != other]
    assert len(changed) <= min(top, len(facts))
    before_lines, after_lines = render_bank(bank).split("\n"), render_bank(after).split("\n")
    differ = [at - 2 for at, pair in enumerate(zip(before_lines, after_lines, strict=True)) if pair[0] != pair[1]]
    assert set(differ) <= set(changed)
    assert {after[row].fact for row in changed} <= {one.id for one in facts}
    assert len({slot.fact for slot in after if slot.fact is not None}) == sum(slot.fact is not None for slot in after)


def test_a_fact_takes_the_slot_of_the_one_it_superseded_else_a_free_one() -> None:
    bank = [Slot(1, "- Anna lives in Berlin"), Slot(2, "- The opera is red"), Slot(), Slot(4, "- My violin is old")]
    after = updated(bank, [fact(7, "Anna lives in Paris.", 1), fact(8, "The river is wide.")], {}, 0, 2)
    assert [slot.fact for slot in after] == [7, 2, 8, 4]


def test_what_every_question_uses_stays() -> None:
    bank = [Slot(1, "- Anna lives by the river"), Slot(2, "- Anna saw a red opera")]
    (first, second) = updated(bank, [fact(9, "Anna lives in a red house by the river.")], {1: 50, 2: 1}, 50, 1)
    assert (first.fact, second.fact) == (1, 9)


def test_the_bank_follows_the_facts(make: MakeMemory) -> None:
    memory = make()
    bank = Bank(memory, num_slots=4, top=2)
    assert [slot.fact for slot in bank.refresh()] == [None] * 4
    memory.add("Anna lives in Berlin. The opera is red. My violin is old.", at=DAY)
    first = bank.refresh()
    assert [slot.fact for slot in first] == [1, 2, 3, None] and bank.refresh() == first
    memory.add("Anna moved to Paris. Ben works at Bosch. Kim works at Nokia.", at=2 * DAY)
    second = bank.refresh()
    assert [slot.fact for slot in second] == [4, 2, 3, 5] and second[1:3] == first[1:3]
    assert Bank(make(), num_slots=4).refresh() == second, "it is kept in the file"
    assert changed_share([slot.line for slot in first], second) == 0.5
    memory.forget([2])
    assert 2 not in [slot.fact for slot in bank.refresh()]


@pytest.mark.parametrize("before", [[], ["-"], ["-"] * 3])
def test_a_bank_of_another_size_has_changed(before: list[str]) -> None:
    assert changed_share(before, [Slot()] * 2) == 1.0
