"""Trees: walks by hand, and walks against the pointer that takes one token at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.budget import select_top
from kvfold.errors import PolicyError
from kvfold.score import Needs, Tree
from kvfold.score.tree import thinned
from tests.score.views import make_view


def test_two_walks() -> None:
    """(0|1) (2|3) leave 0 and 3; (0|3) (4|5) leave 0 and 4."""
    mean_RS = torch.tensor([[0.5, 0.1, 0.2, 0.4, 0.9, 0.3]])
    assert thinned(mean_RS, torch.ones(1, 6, dtype=torch.bool), 2).tolist() == [[3, 1, 1, 2, 3, 2]]


def pointer(means: list[float], capacity: int) -> list[int]:
    """The cache after all tokens have arrived one by one."""
    cache, at = list(range(min(capacity, len(means)))), 0
    for token in range(capacity, len(means)):
        cache.append(token)
        older, newer = cache[at], cache[at + 1]
        cache.remove(newer if means[older] >= means[newer] else older)
        at = (at + 1) % capacity
    return cache


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 9))
def test_walks_are_what_the_pointer_does(means: list[int], capacity: int, padding: int) -> None:
    mean_RS = torch.tensor([[*map(float, means), *([99.0] * padding)]])
    in_tree_RS = torch.arange(mean_RS.shape[1]).unsqueeze(0) < len(means)
    walk_S = thinned(mean_RS, in_tree_RS, capacity)[0, : len(means)]
    stays = (walk_S == (len(means) - 1) // capacity + 1).nonzero().flatten().tolist()
    assert stays == pointer([float(mean) for mean in means], capacity)


def test_sinks_and_recent_slots_stay_and_the_past_thins_out() -> None:
    """Of 1003 slots 3 sinks, 64 recent ones and 61 in the tree: each 61 older ones hold about half as many."""
    view = make_view((1003,), (1003, 1003), Needs(mass=True))
    view = replace(view, slots_per_head=128)
    kept_RS = select_top(Tree(sinks=3).score(view), torch.tensor([128, 128]))
    for kept_S in kept_RS:
        assert kept_S[:3].all() and kept_S[-64:].all()
        counts = [int(kept_S[939 - 61 * (age + 1) : 939 - 61 * age].sum()) for age in range(4)]
        assert sum(counts) >= 50
        assert counts[0] > counts[1] > counts[2]


def test_mean_attention_decides_not_the_sum() -> None:
    view = replace(make_view((4,), (4, 4), Needs()), slots_per_head=2)
    mass_RS, count_RS = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2), torch.tensor([[8.0, 4.0, 2.0, 2.0]] * 2)
    score_S = Tree(sinks=0, recent=0.0).score(replace(view, mass_RS=mass_RS, mass_count_RS=count_RS))[0]
    torch.testing.assert_close(score_S, torch.tensor([1 + 0.5, 2 + 0.75, 2 + 0.999, 1 + 0.5]))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"sinks": -1}, "sinks must be at least 0"), ({"recent": 1.0}, "less than 1")]
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Tree(**arguments)  # type: ignore[arg-type]
