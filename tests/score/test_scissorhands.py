"""Scissorhands: counts of queries that looked elsewhere."""

from __future__ import annotations

import pytest

from kvfold.errors import PolicyError
from kvfold.score import Scissorhands
from tests.score.votes import votes_view


def test_counts_of_weights_below_the_uniform_one() -> None:
    """Weights 4, 1, 1, 2 of 8 against 1/4 and 4, 1, 1 of 6 against 1/3; the last slot is seen once."""
    assert Scissorhands().score(votes_view([4, 1, 1, 2], 2))[0].tolist() == [0, -2, -2, 0]


def test_the_uniform_weight_itself_is_not_ignored() -> None:
    assert Scissorhands().score(votes_view([1.0] * 7, 3))[0].tolist() == [0] * 7


def test_each_query_has_a_threshold_of_its_own() -> None:
    """Slot 2 has 3/10 of the last query (1/4 is uniform) and 3/9 of the one before (1/3 is): never ignored."""
    assert Scissorhands().score(votes_view([5, 1, 3, 1], 2))[0].tolist() == [0, -2, 0, -1]


def test_a_prompt_may_be_shorter_than_the_history() -> None:
    assert Scissorhands(history=400).needs.last_queries == 400
    assert Scissorhands(history=400).needs.window == 0


def test_bad_history() -> None:
    with pytest.raises(PolicyError, match=r"scissorhands\(history=0\): history must be at least 1"):
        Scissorhands(history=0)
