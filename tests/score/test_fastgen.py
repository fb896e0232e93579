"""FastGen: heads of four kinds, told by their attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.budget import Budget
from kvfold.budget.base import Scores
from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.score import FastGen, Needs
from tests.score.views import make_view

SINK = [96.0, 0, 1, 0, 1, 0, 1, 0, 1, 0]
HITTER = [10.0, 0, 0, 50, 0, 36, 1, 1, 1, 1]  # the first slot and the three best hold 97
NEAR = [10.0, 20, 0, 0, 0, 20, 2, 18, 20, 10]  # those hold 70, with the last three 98
SPREAD = [10.0] * 10


@pytest.mark.parametrize(
    ("mass", "kept"),
    [(SINK, [0]), (HITTER, [0, 3, 5]), (NEAR, [0, 1, 5, 7, 8, 9]), (SPREAD, list(range(10)))],
)
def test_the_cheapest_sufficient_set_comes_first(mass: list[float], kept: list[int]) -> None:
    view = replace(make_view((10,), (10, 10), Needs()), mass_RS=torch.tensor([mass, mass]))
    score_S = FastGen(sinks=1, frequent=0.3, local=0.3, recovery=0.95).score(view)[0]
    expected = torch.tensor(mass) / 100
    expected[kept] += 1
    torch.testing.assert_close(score_S, expected)


def test_the_kinds_come_to_the_size() -> None:
    """`fastgen + adaptive(loss=0.999, window=none)`: each head keeps the set of its kind, and the budget is what these
    come to."""
    policy = Policy.parse("fastgen(sinks=1) + adaptive(loss=0.999, window=none) + protect(none)")
    sizes = []
    for mass in (SINK, HITTER, NEAR, SPREAD):
        view = replace(make_view((10,), (10, 10), Needs()), mass_RS=torch.tensor([mass, mass]))
        score_HS = policy.prefill.score.score(view)
        (count_H,) = policy.prefill.budget.allocate([Scores(score_HS)], Budget(10, 1), 0)
        sizes.append(count_H.tolist())
    assert sizes == [[1, 1], [3, 3], [6, 6], [10, 10]]


def test_heads_are_told_apart() -> None:
    view = replace(make_view((10,), (10, 10), Needs()), mass_RS=torch.tensor([SINK, SPREAD]))
    assert (FastGen(sinks=1).score(view) >= 1).sum(-1).tolist() == [1, 10]


def test_recovery_sets_the_price() -> None:
    view = replace(make_view((10,), (10, 10), Needs()), mass_RS=torch.tensor([NEAR, NEAR]))
    counts = [int((FastGen(sinks=1, recovery=r).score(view)[0] >= 1).sum()) for r in (0.1, 0.5, 0.95, 0.99)]
    assert counts == [1, 4, 6, 10]


@pytest.mark.parametrize("name", ["frequent", "local", "recovery"])
def test_shares_lie_between_0_and_1(name: str) -> None:
    with pytest.raises(PolicyError, match=rf"fastgen\({name}=1.5\): {name} is a share, from 0 to 1"):
        FastGen(**{name: 1.5})  # type: ignore[arg-type]
