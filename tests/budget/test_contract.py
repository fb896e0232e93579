"""What every allocator promises, over the whole registry: the rules of `kvfold.testing.check_allocator`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Ada, Adaptive, Allocator, DynamicKV, Global, Lava, Pyramid
from kvfold.policy.bind import missing_arguments
from kvfold.policy.registry import terms
from kvfold.testing import check_allocator
from kvfold.testing.allocator import (
    counts_lie_between_protected_and_existing,
    earlier_layers_only_shrink,
    the_total_is_the_budget,
)
from tests.budget.scores import layers_of_scores

VARIANTS: list[Allocator] = [
    *(Ada(floor=0.0), Ada(floor=1.0), Global(floor=0.5), Pyramid(beta=3)),
    *(Lava(floor=0.0), Lava(floor=0.7), DynamicKV(most=20.0), Adaptive(loss=0.4)),
]
ALONE = [term for term in terms("budget") if not missing_arguments(term, ())]  # profile needs a file of its model
ALLOCATORS: list[Allocator] = [term.variant() for term in ALONE] + VARIANTS
each = pytest.mark.parametrize("allocator", ALLOCATORS, ids=str)


def test_the_budgets_are_registered() -> None:
    assert {"uniform", "pyramid", "ada", "global"} <= {term.name for term in terms("budget")}


@each
def test_the_contract(allocator: Allocator) -> None:
    check_allocator(allocator)


@each
@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 9))
def test_the_contract_on_any_scores(allocator: Allocator, scores: list[Tensor], slots: int) -> None:
    counts_lie_between_protected_and_existing(allocator, scores, slots)
    the_total_is_the_budget(allocator, scores, slots)
    earlier_layers_only_shrink(allocator, scores, slots)


@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 6))
def test_earlier_layers_shrink_also_where_a_layer_has_a_most(scores: list[Tensor], slots: int) -> None:
    earlier_layers_only_shrink(DynamicKV(most=1.5), scores, slots)
