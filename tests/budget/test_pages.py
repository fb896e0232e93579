"""Budgets by page: prices by hand, against slots that compete one by one."""

from __future__ import annotations

import pytest
import torch

from kvfold.budget import Budget, Global, Pages
from kvfold.errors import PolicyError
from tests.budget.scores import allocated

INF = torch.inf
SCORES = torch.tensor([[9.0, 1, 8, 2], [7.0, 6, 5, 0]])  # best first: 9 8 | 2 1 and 7 6 | 5 0


def counts(size: int, slots: int, score_HS: torch.Tensor = SCORES) -> list[int]:
    return allocated(Pages(size), [score_HS], Budget(slots, 1), 0)[0].tolist()


def test_the_dearest_pages_are_kept() -> None:
    assert counts(2, 3) == [2, 4]
    assert allocated(Global(), [SCORES], Budget(3, 1), 0)[0].tolist() == [3, 3]


def test_a_page_is_cut_where_the_budget_ends() -> None:
    score_HS = torch.cat((SCORES, torch.tensor([[0.5, 0.4, 0.3, 0.2]])))
    assert counts(2, 1, score_HS) == [2, 1, 0]


def test_pages_of_one_slot_are_slots() -> None:
    assert counts(1, 3) == [3, 3]


def test_protected_slots_stay_and_their_page_comes_next() -> None:
    score_HS = torch.tensor([[1.0, INF, 0.0, 2.0], [9.0, 8.0, 7.0, 6.0]])
    assert counts(2, 2, score_HS) == [2, 2]
    assert counts(2, 0, score_HS) == [1, 0]


def test_layers_compete() -> None:
    low, high = torch.tensor([[1.0, 0, 3, 2]]), torch.tensor([[9.0, 8, 7, 6]])
    found = allocated(Pages(2), [low, high], Budget(2, 2), 1)
    assert [count_H.tolist() for count_H in found] == [[0], [4]]


def test_bad_size() -> None:
    with pytest.raises(PolicyError, match=r"pages\(size=0\): a page has at least 1 slot"):
        Pages(0)
