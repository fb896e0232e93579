"""The layer budgets of the field, by hand: lava, xkv, dynamickv.

H heads   S slots
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.budget import Allocator, Budget, DynamicKV, Lava, Xkv
from kvfold.budget.lava import entropy
from kvfold.budget.shares import mass
from kvfold.errors import PolicyError
from tests.budget.scores import allocated

INF = torch.inf


def counts_of(allocator: Allocator, scores: list[Tensor], slots: int) -> list[list[int]]:
    counts = allocated(allocator, scores, Budget(slots, len(scores)), len(scores) - 1)
    return [count_H.tolist() for count_H in counts]


def test_mass_keeps_attention_and_lifts_what_is_below_zero() -> None:
    assert mass(torch.tensor([[0.25, INF, 0.5, -INF]])).tolist() == [[0.25, 0.0, 0.5, 0.0]]
    assert mass(torch.tensor([[-1.0, INF], [0.5, -3.0]])).tolist() == [[2.0, 0.0], [3.5, 0.0]]


def test_entropy_runs_from_one_slot_to_all() -> None:
    """p = 1/2, 1/4, 1/8, 1/8: 1.75 bits of 2; protected and missing slots are no candidates."""
    assert float(entropy(torch.tensor([[4.0, 2.0, INF], [1.0, 1.0, -INF]]))) == pytest.approx(1.75 / 2)
    assert float(entropy(torch.ones(2, 8))) == pytest.approx(1.0)
    assert float(entropy(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))) == 0.0


def test_lava_shares_by_entropy() -> None:
    """e = 1 (8 equal), 1/3 (2 equal of 8): of 2 layers * 1 head * 4 slots 6 and 2; until layer 1 is there, all 8."""
    flat, narrow = torch.ones(1, 8), torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    (first_H,) = allocated(Lava(), [flat], Budget(4, 2), 0)
    assert first_H.tolist() == [8]
    assert counts_of(Lava(), [flat, narrow], 4) == [[6], [2]]


def test_lava_counts_protected_slots_before_it_shares() -> None:
    """8 slots, 2 of them protected in layer 1: 6 are free, shared 1 : 1/2 (4 equal; 2 equal of 4)."""
    flat, narrow = torch.ones(1, 4), torch.tensor([[INF, INF, 1.0, 0.0, 1.0, 0.0]])
    assert counts_of(Lava(), [flat, narrow], 4) == [[4], [4]]
    assert counts_of(Lava(), [flat, narrow], 3) == [[3], [3]]  # 4 free: 2.67 and 1.33


def test_lava_heads_compete_above_a_floor() -> None:
    score_HS = torch.stack((torch.linspace(1, 2, 20), torch.linspace(0, 0.5, 20)))
    assert counts_of(Lava(floor=0.0), [score_HS], 10) == [[20, 0]]
    assert counts_of(Lava(), [score_HS], 10) == [[18, 2]]


def test_xkv_gives_each_slot_to_the_largest_gain() -> None:
    """Gains .5 .3 .2 0 and .25 .25 .25 .25: four slots per layer's head are .5 .3 and two of .25."""
    steep, flat = torch.tensor([[0.0, 3.0, 5.0, 2.0]]), torch.full((1, 4), 0.01)
    assert counts_of(Xkv(), [steep, flat], 2) == [[2], [2]]
    assert counts_of(Xkv(), [steep, flat], 3) == [[2], [4]]
    assert counts_of(Xkv(), [flat, steep], 1) == [[0], [2]]


def test_xkv_adds_up_heads_rank_by_rank() -> None:
    """Gains (6 + 1, 2 + 1, 0 + 0) / 10 and .4 .4 .2 over both heads: ranks .7 .4 .4 are 6 slots, shared alike."""
    first = torch.tensor([[6.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    second = torch.tensor([[2.0, 2.0, 1.0], [1.0, 2.0, 2.0]])
    assert counts_of(Xkv(), [first, second], 1) == [[1, 1], [1, 1]]
    assert allocated(Xkv(), [first, second], Budget(3, 2), 1)[1].tolist() == [3, 3]
    counts = allocated(Xkv(), [first, second], Budget(3, 1), 1)  # six slots over the two layers
    assert [count_H.tolist() for count_H in counts] == [[1, 1], [2, 2]]


def test_xkv_keeps_protected_slots_first() -> None:
    """Two protected, then gains 2/3 and 1/3 before 1/4."""
    score_HS = torch.tensor([[0.1, INF, INF, 0.2]])
    assert counts_of(Xkv(), [score_HS, torch.ones(1, 4)], 2) == [[4], [0]]
    assert counts_of(Xkv(), [torch.ones(1, 4), score_HS], 1) == [[0], [2]]


def test_dynamickv_counts_the_best_of_the_model() -> None:
    """Six slots: 9 8 7 6 of layer 0 and 5 5 of layer 1; in layer 0 the heads share four, though one has three."""
    first = torch.tensor([[9.0, 8.0, 7.0, 0.0], [6.0, 0.0, 0.0, 0.0]])
    second = torch.tensor([[5.0, 5.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    counts = allocated(DynamicKV(), [first, second], Budget(3, 1), 1)
    assert [count_H.tolist() for count_H in counts] == [[2, 2], [1, 1]]


def test_dynamickv_bounds_a_layer() -> None:
    strong, weak = torch.full((1, 30), 2.0), torch.full((1, 30), 1.0)
    assert counts_of(DynamicKV(), [strong, weak, weak, weak], 4) == [[16], [0], [0], [0]]
    assert counts_of(DynamicKV(most=2.5), [strong, weak, weak, weak], 4) == [[10], [6], [0], [0]]


def test_bad_arguments() -> None:
    with pytest.raises(PolicyError, match=r"lava\(floor=2\): the floor is a share"):
        Lava(floor=2)
    with pytest.raises(PolicyError, match=r"dynamickv\(most=0.5\): a layer gets at most so many times the mean"):
        DynamicKV(most=0.5)
