"""Hypothesis strategies for scores: few distinct values, so that ties abound, with padding and protected slots.

H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Allocator, Budget
from kvfold.budget.base import Scores
from kvfold.testing.allocator import VALUES


def allocated(allocator: Allocator, scores: Sequence[Tensor], budget: Budget, layer: int) -> list[Tensor]:
    return allocator.allocate([Scores(score_HS) for score_HS in scores], budget, layer)


@st.composite
def scores(draw: st.DrawFn, heads: int | None = None) -> Tensor:
    num_heads = heads if heads is not None else draw(st.integers(1, 4))
    num_slots = draw(st.integers(1, 8))
    row = st.lists(st.sampled_from(VALUES), min_size=num_slots, max_size=num_slots)
    return torch.tensor(draw(st.lists(row, min_size=num_heads, max_size=num_heads)))


@st.composite
def layers_of_scores(draw: st.DrawFn) -> list[Tensor]:
    """Layers of one model: equally many heads, slots as they come."""
    heads = draw(st.integers(1, 3))
    return draw(st.lists(scores(heads), min_size=1, max_size=4))
