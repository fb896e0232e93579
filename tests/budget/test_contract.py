"""What every allocator promises, over the whole registry.

H heads   S slots
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Ada, Adaptive, Allocator, Budget, DynamicKV, Global, Lava, Pyramid
from kvfold.budget.bounds import bounds
from kvfold.policy.bind import missing_arguments
from kvfold.policy.registry import terms
from tests.budget.scores import allocated, layers_of_scores

VARIANTS: list[Allocator] = [
    *(Ada(floor=0.0), Ada(floor=1.0), Global(floor=0.5), Pyramid(beta=3)),
    *(Lava(floor=0.0), DynamicKV(most=20.0), Adaptive(loss=0.4)),
]
ALONE = [term for term in terms("budget") if not missing_arguments(term, ())]  # profile needs a file of its model
ALLOCATORS: list[Allocator] = [term.variant() for term in ALONE] + VARIANTS
each = pytest.mark.parametrize("allocator", ALLOCATORS, ids=str)


def allocate_all(allocator: Allocator, scores: list[Tensor], budget: Budget) -> list[Tensor]:
    """Counts of all layers, by scope: layer by layer, or all at once."""
    if allocator.scope == "model":
        return allocated(allocator, scores, budget, len(scores) - 1)
    return [allocated(allocator, [score_HS], budget, layer)[0] for layer, score_HS in enumerate(scores)]


def test_the_budgets_are_registered() -> None:
    assert {"uniform", "pyramid", "ada", "global"} <= {term.name for term in terms("budget")}


@each
@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 9))
def test_counts_lie_between_protected_and_existing(allocator: Allocator, scores: list[Tensor], slots: int) -> None:
    counts = allocate_all(allocator, scores, Budget(slots, len(scores)))
    for score_HS, count_H in zip(scores, counts, strict=True):
        protected_H, existing_H = bounds(score_HS)
        assert count_H.dtype == torch.int64
        assert (protected_H <= count_H).all() and (count_H <= existing_H).all()


@each
@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 9))
def test_the_total_is_the_budget_as_far_as_slots_allow(allocator: Allocator, scores: list[Tensor], slots: int) -> None:
    if isinstance(allocator, Pyramid):
        scores = scores[:1]  # a line over several layers: tests of its own
    budget = Budget(slots, len(scores))
    counts = allocate_all(allocator, scores, budget)
    groups = [list(range(len(scores)))] if allocator.scope == "model" else [[layer] for layer in range(len(scores))]
    for layers in groups:
        size = slots * sum(scores[layer].shape[0] for layer in layers)
        protected = sum(int(bounds(scores[layer]).protected_H.sum()) for layer in layers)
        existing = sum(int(bounds(scores[layer]).existing_H.sum()) for layer in layers)
        kept, most = sum(int(counts[layer].sum()) for layer in layers), max(protected, min(size, existing))
        assert kept <= most if allocator.may_leave else kept == most


@each
def test_a_budget_beyond_all_slots_keeps_all(allocator: Allocator) -> None:
    scores = [torch.rand(2, 6) + 0.5 for _ in range(3)]
    counts = allocate_all(allocator, scores, Budget(100, 3))
    assert [count_H.tolist() for count_H in counts] == [[6, 6]] * 3


@each
def test_a_layer_without_slots_keeps_none(allocator: Allocator) -> None:
    scores = [torch.full((2, 3), -torch.inf)]
    assert allocate_all(allocator, scores, Budget(2, 1))[0].tolist() == [0, 0]


@each
def test_padding_changes_nothing(allocator: Allocator) -> None:
    scores = [torch.rand(2, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    padded = [torch.nn.functional.pad(score_HS, (0, 5), value=-torch.inf) for score_HS in scores]
    budget = Budget(4, 3)
    ours, theirs = (allocate_all(allocator, given_scores, budget) for given_scores in (scores, padded))
    assert [count_H.tolist() for count_H in ours] == [count_H.tolist() for count_H in theirs]
