"""The global budget in a stream equals the one that sees all layers at once.

H heads   S slots
"""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Budget, Global, select_top
from kvfold.budget.select import count_top
from tests.budget.scores import allocated, layers_of_scores

FLOORS = st.sampled_from([0.0, 0.2, 0.5, 1.0])


def stream(allocator: Global, scores: list[Tensor], budget: Budget) -> list[list[Tensor]]:
    """Counts after each layer, where slots not chosen are gone before the next one comes."""
    held: list[Tensor] = []
    history = []
    for layer, score_HS in enumerate(scores):
        counts = allocated(allocator, [*held, score_HS], budget, layer)
        pairs = zip([*held, score_HS], counts, strict=True)
        held = [s.masked_fill(~select_top(s, count_H), -torch.inf) for s, count_H in pairs]
        history.append(counts)
    return history


@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 6), FLOORS)
def test_streamed_equals_offline(scores: list[Tensor], slots: int, floor: float) -> None:
    budget = Budget(slots, len(scores))
    offline = allocated(Global(floor), scores, budget, len(scores) - 1)
    streamed = stream(Global(floor), scores, budget)[-1]
    assert [count_H.tolist() for count_H in streamed] == [count_H.tolist() for count_H in offline]


@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 6), FLOORS)
def test_earlier_layers_only_shrink(scores: list[Tensor], slots: int, floor: float) -> None:
    history = stream(Global(floor), scores, Budget(slots, len(scores)))
    for before, after in pairwise(history):
        assert all((now_H <= then_H).all() for then_H, now_H in zip(before, after, strict=False))


@settings(deadline=None)
@given(layers_of_scores(), st.integers(1, 6))
def test_without_protection_it_is_one_top_k(scores: list[Tensor], slots: int) -> None:
    plain = [score_HS.clamp(max=2.0) for score_HS in scores]
    total = slots * len(scores) * scores[0].shape[0]
    counts = allocated(Global(), plain, Budget(slots, len(scores)), len(scores) - 1)
    assert [c.tolist() for c in counts] == [c.tolist() for c in count_top(plain, total)]


def test_layers_compete() -> None:
    low, high = torch.linspace(0, 0.5, 8).view(2, 4), torch.linspace(0.6, 1, 8).view(2, 4)
    counts = allocated(Global(), [low, high], Budget(2, 2), 1)
    assert [count_H.tolist() for count_H in counts] == [[0, 0], [4, 4]]
    with_floor = allocated(Global(floor=0.5), [low, high], Budget(2, 2), 1)
    assert [count_H.tolist() for count_H in with_floor] == [[1, 1], [2, 4]]


def test_the_first_layer_may_hold_the_whole_budget_until_others_come() -> None:
    (count_H,) = allocated(Global(), [torch.rand(2, 100)], Budget(10, 4), 0)
    assert int(count_H.sum()) == 80


def test_ties_go_to_the_earlier_layer() -> None:
    counts = allocated(Global(), [torch.zeros(1, 4), torch.zeros(1, 4)], Budget(3, 2), 1)
    assert [count_H.tolist() for count_H in counts] == [[4], [2]]
