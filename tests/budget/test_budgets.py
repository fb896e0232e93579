"""The budgets' own numbers: uniform, pyramid, ada.

H heads   S slots
"""

from __future__ import annotations

import warnings

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
    """Every layer holds the window, and falls wherever at least one slot per layer competes."""
    counts = pyramid(beta, stored, window, mean + window, layers)
    assert sum(counts) == (mean + window) * layers
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= window
    steep = beta > 1 and mean >= 2 and stored - window > mean + 1
    assert not steep or counts[0] > counts[-1]


def pyramid(beta: int, num_tokens: int, window: int, mean: int, layers: int) -> list[int]:
    budget = Budget(mean, layers)
    return [Pyramid(beta=beta).layer_slots(num_tokens, window, budget, layer) for layer in range(layers)]


def authors_pyramid(beta: int, num_tokens: int, window: int, mean: int, layers: int) -> list[int]:
    """PyramidKVCluster: whole numbers, the window on top of what is scored."""
    free = mean - window
    least = free // beta
    most = 2 * free - least
    if most >= num_tokens - window:
        most = num_tokens - window
        least = 2 * free - most
    step = (most - least) // (layers - 1)
    if num_tokens < 2 * free:
        return [mean] * layers
    return [most - layer * step + window for layer in range(layers)]


@pytest.mark.parametrize("window", [8, 32, 64])
@pytest.mark.parametrize(("num_tokens", "mean"), [(4096, 512), (4096, 128), (2000, 500), (1500, 600)])
def test_pyramid_is_the_authors_but_for_rounding(num_tokens: int, mean: int, window: int) -> None:
    """Their slope is rounded down, so the last of n layers keeps up to n - 2 slots more, and the sum is off by as much
    for each pair; ours never strays further from theirs than that, and adds up. At 512 of 4,096 and a window of 32,
    `snapkv`'s own, it slopes."""
    layers = 32
    found, theirs = (each(20, num_tokens, window, mean, layers) for each in (pyramid, authors_pyramid))
    assert sum(found) == layers * mean
    assert abs(found[0] - theirs[0]) <= 1
    assert all(abs(a - b) <= layer + 1 for layer, (a, b) in enumerate(zip(found, theirs, strict=True)))
    assert found[0] > found[-1] >= window


def test_pyramid_of_the_paper() -> None:
    """B = 512 beside a window of 8, beta = 20: from 2 * 512 - 25.6 down to 25.6, and 8."""
    counts = pyramid(20, 4096, 8, 520, 32)
    assert (counts[0], counts[-1]) == (998 + 8, 26 + 8)


def test_pyramid_of_one_layer_keeps_the_mean() -> None:
    assert pyramid(20, 100, 0, 10, 1) == [10]


def test_pyramid_warns_where_it_is_uniform() -> None:
    """All of 5 slots are protected in a layer of 40: every layer keeps 5. With one more it slopes, in silence."""
    score_HS = torch.rand(1, 40)
    score_HS[0, -5:] = torch.inf
    with pytest.warns(UserWarning, match="pyramid is uniform here: protected slots"):
        assert allocated(Pyramid(), [score_HS], Budget(5, 3, 40), 0)[0].tolist() == [5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = [allocated(Pyramid(), [score_HS], Budget(8, 3, 40), layer)[0].tolist() for layer in range(3)]
    assert counts == [[11], [8], [5]]


def test_a_layer_that_holds_less_leaves_the_line_as_it_is() -> None:
    """After an earlier round upper layers hold fewer slots; that gives none of them more than its share."""
    budget, pyramid_of = Budget(10, 3, 100), Pyramid()
    lens, line = (19, 12, 6), [20, 10, 0]
    counts = [allocated(pyramid_of, [torch.rand(1, n)], budget, layer)[0] for layer, n in enumerate(lens)]
    assert [int(count_H[0]) for count_H in counts] == [min(a, b) for a, b in zip(lens, line, strict=True)]


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
