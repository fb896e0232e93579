"""`check_allocator` names the rule that an allocator breaks: each example spoils the counts of one that keeps them.

H heads   S slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from kvfold.budget import Allocator, Budget, Uniform
from kvfold.budget.base import Scores
from kvfold.score import View
from kvfold.testing import check_allocator

Spoil = Callable[[Tensor, Scores, Budget], Tensor]


@dataclass(frozen=True)
class Example(Allocator):
    """Equal counts, spoilt by a function."""

    spoil: Spoil

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        counts = Uniform().allocate(scores, budget, layer)
        return [self.spoil(count_H, one, budget) for count_H, one in zip(counts, scores, strict=True)]


class Leaving(Example):
    """May leave slots of its budget unused."""

    may_leave: ClassVar[bool] = True


@dataclass(frozen=True)
class Later(Allocator):
    """The first layer gets the whole budget, but not before the last layer is there."""

    scope: ClassVar[Literal["layer", "model"]] = "model"

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        left = budget.slots_per_head * sum(len(one.score_HS) for one in scores) if layer + 1 == budget.num_layers else 0
        left -= sum(int(one.bounds.protected_H.sum()) for one in scores)
        counts = []
        for one in scores:
            count_H, existing_H = (bound_H.clone() for bound_H in one.bounds)
            for head in range(len(count_H)):
                more = max(0, min(left, int(existing_H[head] - count_H[head])))
                count_H[head] += more
                left -= more
            counts.append(count_H)
        return counts


class Weighing(Example):
    @property
    def last_queries(self) -> int:
        return 8

    def weigh(self, score_HS: Tensor, view: View) -> Tensor:
        return score_HS.nan_to_num(posinf=1.0)


def unspoilt(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H


def in_int32(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H.int()


def of_one_head(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H[:1]


def one_more(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H + 1


def at_most_five(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H.clamp(max=5)


def without_protection(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return torch.minimum(scores.bounds.existing_H, torch.tensor(budget.slots_per_head))


def beyond_what_exists(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return (
        torch.where(scores.bounds.existing_H > 0, count_H.clamp(min=1), count_H) if len(count_H) == 2 else count_H + 1
    )


def over_budget(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return torch.minimum(count_H + 1, scores.bounds.existing_H)


def protected_alone(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H if budget.slots_per_head > 9 else scores.bounds.protected_H


def fewer_in_wide_layers(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
    return count_H - 1 if scores.score_HS.shape[1] > 10 else count_H


BROKEN: list[tuple[Allocator, str]] = [
    (Example(in_int32), "counts must be int64"),
    (Example(of_one_head), r"one count for each head of each layer: \[\[2\]\], not \[\[1\]\]"),
    (Example(one_more), r"a layer without slots .* must keep none"),
    (Example(at_most_five), "a budget beyond all slots must keep all of them"),
    (Example(without_protection), r"must keep all of its protected slots \(score \+inf\)"),
    (Example(beyond_what_exists), "must not keep more slots than exist"),
    (Example(over_budget), r"must not exceed the budget of \d+ slots; they add up to"),
    (Example(protected_alone), r"counts must add up to the budget, \d+ slots, not \d+, unless may_leave is True"),
    (Later(), "counts of earlier layers may only shrink"),
    (Leaving(fewer_in_wide_layers), r"padding \(score -inf\) must not change the counts"),
    (Weighing(unspoilt), r"as many -inf and \+inf in each head"),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN)
def test_a_broken_rule_is_named(broken: Allocator, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        check_allocator(broken)


def test_an_allocator_that_keeps_the_contract_passes() -> None:
    check_allocator(Example(unspoilt))
    check_allocator(Leaving(protected_alone))


def test_an_error_is_told_with_what_was_asked() -> None:
    def fails(count_H: Tensor, scores: Scores, budget: Budget) -> Tensor:
        raise RuntimeError("no room")

    with pytest.raises(AssertionError, match="take 2 slots a head for 1 layers; it raised RuntimeError: no room"):
        check_allocator(Example(fails))
