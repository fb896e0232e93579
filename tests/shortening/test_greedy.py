"""The choice of units by hand: worth, room, repetition, overlaps, shares of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from kvfold.shortening import greedy
from kvfold.shortening.base import Floats, Selector, Task, Unit
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.greedy import choose, segments
from kvfold.shortening.selectors.truncation import Ends, Head, Tail
from kvfold.shortening.tokens import TokenOffsets


@dataclass(frozen=True)
class Given(Selector):
    """Worth and similarity as given."""

    worths: tuple[float, ...]

    def worth(self, task: Task) -> Floats:
        return np.array(self.worths)


@dataclass(frozen=True)
class Apart(Given):
    alike: tuple[tuple[float, ...], ...] = ()
    avoids_repeats: ClassVar[bool] = True

    def similarity(self, task: Task, low: int, high: int) -> Floats:
        return np.array(self.alike)[low:high, low:high]


def task_of(spans: Sequence[tuple[int, int]], target: int, kept: Sequence[int] = ()) -> Task:
    """Units of a text whose characters are its tokens."""
    text = "x" * max(end for _, end in spans)
    kept_N = np.isin(np.arange(len(spans)), kept)
    units = tuple(Unit(start, end, "chunk") for start, end in spans)
    return Task(text, units, TokenOffsets(np.arange(len(text))), target, kept_N, None, HashedTfIdf())


def chosen(task: Task, selector: Selector) -> list[int]:
    return [int(number) for number in np.flatnonzero(choose(task, selector))]


FOUR = ((0, 4), (4, 6), (6, 9), (9, 10))


def test_the_worthiest_first_and_others_that_fit() -> None:
    worths = (3.0, 1.0, 2.0, 0.0)
    assert chosen(task_of(FOUR, 4), Given(worths)) == [0]
    assert chosen(task_of(FOUR, 5), Given(worths)) == [0, 3]  # unit 2 takes 3 tokens, unit 1 takes 2, unit 3 takes 1
    assert chosen(task_of(FOUR, 6), Given(worths)) == [0, 1]
    assert chosen(task_of(FOUR, 7), Given(worths)) == [0, 2]


def test_of_two_alike_the_earlier_stays() -> None:
    assert chosen(task_of(((0, 2), (2, 4), (4, 6)), 4), Given((1.0, 1.0, 1.0))) == [0, 1]


def test_what_must_stay_takes_room_first() -> None:
    assert chosen(task_of(FOUR, 6, kept=[1]), Given((3.0, 0.0, 2.0, 1.0))) == [0, 1]
    assert chosen(task_of(FOUR, 5, kept=[1]), Given((3.0, 0.0, 2.0, 1.0))) == [1, 2]


def test_truncation_ends_where_a_unit_does_not_fit() -> None:
    assert chosen(task_of(FOUR, 8), Head()) == [0, 1]  # unit 3 would fit, but is not the beginning
    assert chosen(task_of(FOUR, 5), Tail()) == [2, 3]
    assert chosen(task_of(FOUR, 6), Ends()) == [0, 3]


def test_a_unit_that_repeats_another_is_worth_half() -> None:
    spans = ((0, 2), (2, 4), (4, 6))
    alike = ((1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    assert chosen(task_of(spans, 4), Apart((1.0, 0.9, 0.5), alike)) == [0, 2]  # 0.9 falls to 0.45
    assert chosen(task_of(spans, 4), Apart((1.0, 0.9, 0.4), alike)) == [0, 1]
    assert chosen(task_of(spans, 4, kept=[1]), Apart((1.0, 0.9, 0.6), alike)) == [1, 2]


def test_a_token_of_two_units_counts_once() -> None:
    overlapping = ((0, 4), (3, 7), (6, 10))
    assert chosen(task_of(overlapping, 7), Given((3.0, 2.0, 1.0))) == [0, 1]
    assert chosen(task_of(overlapping, 6), Given((3.0, 2.0, 1.0))) == [0]
    assert chosen(task_of(overlapping, 10), Given((3.0, 1.0, 2.0))) == [0, 1, 2]  # 4, 4 and the 2 between
    assert chosen(task_of(overlapping, 7, kept=[1]), Given((3.0, 0.0, 1.0))) == [0, 1]


def test_a_unit_overlaps_more_than_its_neighbours() -> None:
    spans = ((0, 6), (2, 8), (4, 10), (6, 12))
    assert chosen(task_of(spans, 12), Given((2.0, 0.0, 0.0, 1.0))) == [0, 1, 2, 3]


def test_segments_are_nearly_equal() -> None:
    assert segments(0) == [(0, 0)] and segments(7) == [(0, 7)]
    assert segments(greedy.SEGMENT + 2) == [(0, greedy.SEGMENT // 2 + 1), (greedy.SEGMENT // 2 + 1, greedy.SEGMENT + 2)]


def test_each_segment_has_its_share_and_what_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "SEGMENT", 2)
    spans = ((0, 3), (3, 6), (6, 8), (8, 12))
    alike = tuple(map(tuple, np.eye(4)))
    # 6 of 12 tokens: 3 for the first segment (6 tokens), and 3 for the second, where only 2 fit.
    assert chosen(task_of(spans, 6), Apart((4.0, 3.0, 1.0, 2.0), alike)) == [0, 2]
    # 5 tokens: the first segment has 2, which nobody takes; the second has all 5.
    assert chosen(task_of(spans, 5), Apart((4.0, 3.0, 1.0, 2.0), alike)) == [3]
    # Without comparisons the whole text is one order.
    assert chosen(task_of(spans, 6), Given((4.0, 3.0, 1.0, 2.0))) == [0, 1]
