"""`check_scorer` names the rule that a scorer breaks: one scorer for each rule, which breaks that one alone.

R rows   S slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.score import Needs, Scorer, View
from kvfold.score.base import given
from kvfold.testing import check_scorer

Score = Callable[[View], Any]


@dataclass(frozen=True)
class Example(Scorer):
    """Scores by a function."""

    function: Score
    wants: Needs = field(default_factory=Needs)

    @property
    def needs(self) -> Needs:
        return self.wants

    def score(self, view: View) -> Tensor:
        found: Tensor = self.function(view)
        return found


def by_value(view: View) -> Tensor:
    return view.masked(view.v_RSD.float().norm(dim=-1))


def with_padding(view: View) -> Tensor:
    return view.masked(view.v_RSD.float().norm(dim=-1) - view.v_RSD.float().norm(dim=-1).nan_to_num().mean(-1, True))


def of_the_batch(view: View) -> Tensor:
    return view.masked(by_value(view) - by_value(view)[view.valid_RS].mean())


def writing(view: View) -> Tensor:
    found = by_value(view)
    view.position_RS.clamp_(max=50)
    return found


def by_differences(view: View) -> Tensor:
    return view.masked(view.v_RSD.float().norm(dim=-1) / (view.len_R - 1).unsqueeze(-1) * 0 + by_value(view))


def raising(view: View) -> Tensor:
    if view.valid_RS.shape[1] == 1:
        raise ValueError("no slots to compare")
    return by_value(view)


BROKEN: list[tuple[Score, str]] = [
    (lambda view: by_value(view).double(), "must be float32, not torch.float64"),
    (lambda view: by_value(view)[:, :-1], r"the shape \[rows, slots\] \[6, 61\], not \[6, 60\]"),
    (lambda view: by_value(view).masked_fill(view.position_RS == 3, torch.nan), "must not be NaN"),
    (lambda view: view.position_RS.float(), "scores of padding must be -inf"),
    (lambda view: by_value(view).masked_fill(view.position_RS < 40, -torch.inf), "stored slots must be above -inf"),
    (lambda view: by_value(view).tolist(), "must return a tensor"),
    (lambda view: view.masked(view.k_RSD @ torch.ones(8)), "keys and values in bfloat16 must be scored; it raised"),
    (writing, r"must not write to the view; it changed view\.position_RS"),
    (lambda view: by_value(view) * torch.rand(()), "the same view must get the same scores every time"),
    (lambda view: view.masked(view.mass_RS.sum(0)), r"unless `needs` declares them: .*mass_RS"),  # type: ignore[union-attr]
    (with_padding, "keys and values in the padding"),
    (of_the_batch, "the same scores in a batch as alone"),
    (lambda view: by_value(view) * view.slots_per_head, r"must say so: needs = Needs\(size=True\)"),
    (by_differences, "the score of a single slot must be a number"),
    (raising, "a prompt of one token must be scored; it raised ValueError: no slots to compare"),
]


@pytest.mark.parametrize(("score", "rule"), BROKEN)
def test_a_broken_rule_is_named(score: Score, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        check_scorer(Example(score))


def test_what_is_needed_and_missing_is_named() -> None:
    def mass(view: View) -> Tensor:
        return view.masked(given("example", view.mass_RS, "mass_RS"))

    def asserted(view: View) -> Tensor:
        assert view.mass_RS is not None
        return view.masked(view.mass_RS)

    wants = Needs(mass=True)
    check_scorer(Example(mass, wants))
    with pytest.raises(AssertionError, match=r"must be an InputError that names it .*; it raised AssertionError"):
        check_scorer(Example(asserted, wants))
    with pytest.raises(AssertionError, match="; it did without"):
        check_scorer(Example(by_value, wants))


def test_a_scorer_that_keeps_the_contract_passes() -> None:
    check_scorer(Example(by_value))
    check_scorer(Example(lambda view: by_value(view) * view.slots_per_head, Needs(size=True)))


def test_what_is_no_scorer_is_told() -> None:
    class Loose(Scorer):
        def score(self, view: View) -> Tensor:
            return by_value(view)

    with pytest.raises(AssertionError, match="Loose must be a frozen dataclass"):
        check_scorer(Loose())
    with pytest.raises(AssertionError, match=r"str must derive from kvfold\.score\.base\.Scorer"):
        check_scorer("keydiff")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"give an instance, Example\(\.\.\.\), not the class"):
        check_scorer(Example)  # type: ignore[arg-type]


def test_a_term_says_what_it_does() -> None:
    @dataclass(frozen=True)
    class Silent(Scorer):
        def score(self, view: View) -> Tensor:
            return by_value(view)

    with pytest.raises(AssertionError, match="Silent must have a docstring"):
        check_scorer(Silent())
