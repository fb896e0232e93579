"""The budgets' own numbers: uniform, pyramid, ada.

H heads   S slots
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Ada, Budget, Global, Pyramid, Uniform
from kvfold.budget.shares import apportion
from kvfold.errors import PolicyError
from tests.budget.scores import allocated, scores


def one_layer(allocator: Ada | Uniform, score_HS: Tensor, slots: int) -> list[int]:
    (count_H,) = allocated(allocator, [score_HS], Budget(slots, 1), 0)
    counts: list[int] = count_H.tolist()
    return counts


def ragged(*lens: int) -> Tensor:
    score_HS = torch.full((len(lens), max(lens)), -torch.inf)
    for head, length in enumerate(lens):
        score_HS[head, :length] = torch.rand(length)
    return score_HS


def test_uniform_is_equal() -> None:
    assert one_layer(Uniform(), ragged(10, 10, 10), 4) == [4, 4, 4]


@settings(deadline=None)
@given(scores(), st.integers(0, 12))
def test_uniform_is_the_apportionment_of_equal_weights(score_HS: Tensor, slots: int) -> None:
    low = (score_HS == torch.inf).sum(-1).tolist()
    high = (score_HS > -torch.inf).sum(-1).tolist()
    plain = apportion(slots * len(low), [1.0] * len(low), low, high)
    assert one_layer(Uniform(), score_HS, slots) == plain


def test_uniform_gives_what_is_left_to_the_first_that_can_take_it() -> None:
    """Also to one whose protected slots are as many as the others get."""
    score_HS = ragged(4, 4, 1)
    score_HS[0, :2] = torch.inf
    assert one_layer(Uniform(), score_HS, 2) == [3, 2, 1]


def test_uniform_passes_on_what_a_short_head_cannot_use() -> None:
    assert one_layer(Uniform(), ragged(2, 10, 10), 4) == [2, 5, 5]


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(2, 40), st.integers(1, 30), st.integers(0, 8), st.integers(1, 400))
def test_pyramid_falls_and_adds_up(mean: int, layers: int, beta: int, window: int, stored: int) -> None:
    budget = Budget(mean, layers, window)
    counts = [Pyramid(beta=beta).layer_slots(stored, budget, layer) for layer in range(layers)]
    assert sum(counts) == mean * layers
    assert counts == sorted(counts, reverse=True)
    assert counts == [mean] * layers or counts[-1] >= window


def test_pyramid_of_the_paper() -> None:
    """B = 512, beta = 20: from 2 * 512 - 25.6 down to 25.6."""
    budget = Budget(512, 32, window=16)
    counts = [Pyramid().layer_slots(4096, budget, layer) for layer in range(32)]
    assert (counts[0], counts[-1]) == (998, 26)


def test_pyramid_is_flat_where_the_last_layer_could_not_hold_the_window() -> None:
    assert [Pyramid().layer_slots(4096, Budget(512, 4, window=64), layer) for layer in range(4)] == [512] * 4


def test_pyramid_of_one_layer_keeps_the_mean() -> None:
    assert Pyramid().layer_slots(100, Budget(10, 1), 0) == 10


def test_ada_gives_slots_to_the_head_that_spreads() -> None:
    score_HS = torch.tensor([[0.9, 0.0, 0.0, 0.0], [0.5, 0.4, 0.3, 0.2]])
    assert one_layer(Ada(floor=0.0), score_HS, 2) == [1, 3]


def test_ada_floor_is_a_share_of_the_mean() -> None:
    score_HS = torch.stack((torch.linspace(1, 2, 20), torch.linspace(0, 0.5, 20)))
    assert one_layer(Ada(floor=0.0), score_HS, 10) == [20, 0]
    assert one_layer(Ada(floor=0.2), score_HS, 10) == [18, 2]
    assert one_layer(Ada(floor=0.01), score_HS, 10) == [19, 1]
    assert one_layer(Ada(floor=1.0), score_HS, 10) == [10, 10]


def test_ada_counts_protected_slots_inside_floor_and_budget() -> None:
    score_HS = torch.stack((torch.linspace(1, 2, 10), torch.linspace(0, 0.5, 10)))
    score_HS[:, -3:] = torch.inf
    assert one_layer(Ada(floor=0.5), score_HS, 5) == [7, 3]


def test_ada_keeps_protected_slots_before_floors() -> None:
    score_HS = torch.tensor([[1.0, 1.0, 1.0, 1.0], [torch.inf, torch.inf, torch.inf, 0.0]])
    assert one_layer(Ada(floor=1.0), score_HS, 2) == [1, 3]


def test_ada_ties_go_to_the_earlier_head() -> None:
    assert one_layer(Ada(floor=0.0), torch.zeros(3, 4), 2) == [4, 2, 0]


@pytest.mark.parametrize("allocator", [Ada, Global])
@pytest.mark.parametrize("floor", [-0.1, 1.5])
def test_bad_floor(allocator: type[Ada] | type[Global], floor: float) -> None:
    with pytest.raises(PolicyError, match=rf"\(floor={floor}\): the floor is a share"):
        allocator(floor=floor)


def test_bad_beta() -> None:
    with pytest.raises(PolicyError, match=r"pyramid\(beta=0\): beta must be at least 1"):
        Pyramid(beta=0)
