"""The choice of units by hand: worth, room, words that stay already, sentences that are repeated, overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from kvfold.errors import SizeError
from kvfold.shortening.base import Floats, Selector, Task, Unit
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.greedy import choose
from kvfold.shortening.room import Room
from kvfold.shortening.selectors.truncation import Ends, Head, Tail
from kvfold.shortening.tokens import TokenOffsets


@dataclass(frozen=True)
class Given(Selector):
    """Worth as given."""

    worths: tuple[float, ...]

    def worth(self, task: Task) -> Floats:
        return np.array(self.worths)


@dataclass(frozen=True)
class Apart(Given):
    avoids_repeats: ClassVar[bool] = True


def task_of(text: str, units: Sequence[tuple[int, int]], target: int, kept: Sequence[int] = ()) -> Task:
    """Units by the numbers of their words, which are the tokens; every word is a part."""
    starts = [*TokenOffsets.of(text).starts.tolist(), len(text)]
    parts = tuple(Unit(low, high, "sentence") for low, high in pairwise(starts))
    spans = tuple(Unit(starts[low], starts[high], "chunk") for low, high in units)
    kept_n = np.isin(np.arange(len(parts)), kept)
    return Task(text, spans, parts, kept_n, TokenOffsets.of(text), target, None, HashedTfIdf())


def chosen(task: Task, selector: Selector) -> str:
    return "".join(task.text[low:high] for low, high in choose(task, selector))


LETTERS = "a b c d e f g h i j"
FOUR = ((0, 4), (4, 6), (6, 9), (9, 10))


def test_the_worthiest_first_and_others_that_fit() -> None:
    selector = Given((3.0, 1.0, 2.0, 0.0))
    assert chosen(task_of(LETTERS, FOUR, 4), selector) == "a b c d "
    assert chosen(task_of(LETTERS, FOUR, 5), selector) == "a b c d j"  # g h i takes 3 tokens, e f takes 2
    assert chosen(task_of(LETTERS, FOUR, 6), selector) == "a b c d e f "
    assert chosen(task_of(LETTERS, FOUR, 7), selector) == "a b c d g h i "


@pytest.mark.parametrize("selector", (Given((1.0, 1.0, 1.0)), Apart((1.0, 1.0, 1.0))))
def test_of_two_alike_the_earlier_stays(selector: Selector) -> None:
    assert chosen(task_of("a b c d e f", ((0, 2), (2, 4), (4, 6)), 4), selector) == "a b c d "


def test_what_must_stay_takes_room_first() -> None:
    selector = Given((3.0, 0.0, 2.0, 1.0))
    assert chosen(task_of(LETTERS, FOUR, 6, kept=[4, 5]), selector) == "a b c d e f "
    assert chosen(task_of(LETTERS, FOUR, 5, kept=[4, 5]), selector) == "e f g h i "
    assert chosen(task_of(LETTERS, FOUR, 5, kept=[1]), selector) == "a b c d j"  # a unit costs what does not stay yet
    with pytest.raises(SizeError, match="is 3 tokens"):
        choose(task_of(LETTERS, FOUR, 2, kept=[1, 2, 9]), selector)


def test_truncation_ends_where_a_unit_does_not_fit() -> None:
    assert chosen(task_of(LETTERS, FOUR, 8), Head()) == "a b c d e f "  # j would fit, but is not the beginning
    assert chosen(task_of(LETTERS, FOUR, 5), Tail()) == "g h i j"
    assert chosen(task_of(LETTERS, FOUR, 6), Ends()) == "a b c d j"


def test_a_unit_whose_words_stay_already_is_worth_half() -> None:
    units = ((0, 2), (2, 4), (4, 6))
    text = "ice snow ice snow sun sand"
    assert chosen(task_of(text, units, 4), Apart((1.0, 0.9, 0.5))) == "ice snow sun sand"  # 0.9 falls to 0.45
    assert chosen(task_of(text, units, 4), Apart((1.0, 0.9, 0.4))) == "ice snow ice snow "
    assert chosen(task_of(text, units, 4, kept=[2, 3]), Apart((1.0, 0.9, 0.6))) == "ice snow sun sand"
    assert chosen(task_of(text, units, 4), Given((1.0, 0.9, 0.5))) == "ice snow ice snow "
    negative = Apart((-1.0, -1.1, -1.5))  # of -1.1 half more is -1.65
    assert chosen(task_of(text, units, 4), negative) == "ice snow sun sand"


def test_rare_words_count_more() -> None:
    text = "the ice the sun the rain the ice ice ice ice"
    units = ((0, 2), (2, 4), (4, 6), (6, 8))
    # "the" is in all units (idf 0.105), "ice" in two, "sun" in one: of "the sun" little stays already.
    assert chosen(task_of(text, units, 4), Apart((1.0, 0.6, 0.5, 0.9))) == "the ice the sun "


SAID = "the ice broke in the harbour today "


def test_a_sentence_that_is_repeated_stays_once() -> None:
    text = f"{SAID}ships left {SAID}gulls came "
    spans = (0, 35, 46, 81, 92)
    parts = tuple(Unit(low, high, "sentence") for low, high in pairwise(spans))
    units = (Unit(0, 46, "chunk"), Unit(46, 92, "chunk"))
    task = Task(text, units, parts, np.zeros(4, dtype=bool), TokenOffsets.of(text), 11, None, HashedTfIdf())
    assert chosen(task, Apart((1.0, 2.0))) == f"ships left {SAID}gulls came "
    assert chosen(task, Given((1.0, 2.0))) == f"{SAID}gulls came "  # 9 tokens, and the other unit has 9 more
    kept = Task(text, units, parts, np.arange(4) == 0, TokenOffsets.of(text), 11, None, HashedTfIdf())
    assert chosen(kept, Apart((1.0, 2.0))) == f"{SAID}ships left gulls came "


def test_short_sentences_may_be_repeated() -> None:
    assert chosen(task_of("no no yes", ((0, 1), (1, 2), (2, 3)), 3), Apart((1.0, 1.0, 1.0))) == "no no yes"


@pytest.mark.parametrize("kind", (Given, Apart))
def test_a_token_of_two_units_counts_once(kind: type[Given]) -> None:
    overlapping = ((0, 4), (3, 7), (6, 10))
    assert chosen(task_of(LETTERS, overlapping, 7), kind((3.0, 2.0, 1.0))) == "a b c d e f g "
    assert chosen(task_of(LETTERS, overlapping, 6), kind((3.0, 2.0, 1.0))) == "a b c d "
    assert chosen(task_of(LETTERS, overlapping, 10), kind((3.0, 1.0, 2.0))) == LETTERS  # 4, 4 and the 2 between
    assert chosen(task_of(LETTERS, overlapping, 7, kept=range(3, 7)), kind((3.0, 0.0, 1.0))) == "a b c d e f g "


def test_a_unit_may_overlap_more_than_its_neighbours() -> None:
    spans = ((0, 6), (2, 8), (4, 10))
    assert chosen(task_of(LETTERS, spans, 10), Given((2.0, 0.0, 1.0))) == LETTERS


def test_pieces_are_cut_where_units_and_parts_begin() -> None:
    task = task_of(LETTERS, ((0, 4), (3, 10)), 10)
    room = Room.of(task, False)
    assert [room.cost(unit) for unit in (0, 1)] == [4, 7]
    room.take(0)
    assert [room.cost(unit) for unit in (0, 1)] == [0, 6] and room.left == 6
    assert room.spans() == ((0, 8),)
