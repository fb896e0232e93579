"""Two stages on weights and norms that can be multiplied by hand.

R rows   S slots   D head dim
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.budget import select_top
from kvfold.errors import PolicyError
from kvfold.score import Critical, Full, KVzip, SnapKV, View
from kvfold.score.critical import ranks
from tests.score.test_kvzip import replayed_view

SCORER = Critical(KVzip(sinks=0), first=0.5, epsilon=0.1)


def view_of(slots_per_head: int) -> View:
    return replace(replayed_view(), slots_per_head=slots_per_head)


def test_the_second_stage_weighs_values() -> None:
    """Weights .5, .3, .2, .6; norms |v W_o|_1, mean of both heads: 2.8/2, .5/2, (8.4+2)/2, (2.8+.5)/2."""
    score_RS = replace(SCORER, first=0.0).score(view_of(2))
    torch.testing.assert_close(score_RS, torch.tensor([[0.6 * 1.4, 0.4 * 0.25, 0.3 * 5.2, 0.7 * 1.65]]))


def test_the_first_stage_goes_by_weight_alone() -> None:
    """Slot 3 has the largest weight and the second largest product; half of two slots is one slot."""
    order = ranks(SCORER.score(view_of(2))).tolist()
    assert order == [[2, 3, 1, 0]]
    assert ranks(replace(SCORER, first=0.0).score(view_of(2))).tolist() == [[2, 3, 0, 1]]
    assert ranks(replace(SCORER, first=1.0).score(view_of(2))).tolist() == [[1, 3, 2, 0]]
    assert select_top(SCORER.score(view_of(2)), torch.tensor([2])).tolist() == [[False, False, True, True]]


def test_nobody_says_a_budget_means_no_first_stage() -> None:
    torch.testing.assert_close(SCORER.score(view_of(0)), replace(SCORER, first=0.0).score(view_of(0)))


def test_what_the_inner_score_always_keeps_stays() -> None:
    score_S = replace(SCORER, scorer=KVzip(sinks=2)).score(view_of(4))[0]
    assert score_S[:2].tolist() == [math.inf, math.inf]
    assert score_S[2:].isfinite().all()
    assert ranks(score_S[None]).tolist() == [[0, 1, 2, 3]], (
        "sinks are the first stage of four slots; 2 beats 3 by value"
    )


def test_it_needs_what_the_inner_score_needs_and_the_projection() -> None:
    assert Critical().needs == replace(SnapKV().needs, output=True, size=True)
    assert Critical(KVzip()).needs.replay == KVzip().needs.replay


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": 1.5}, r"critical\(first=1.5\): first is a share of the budget"),
        ({"epsilon": -1.0}, r"epsilon must be at least 0"),
        ({"scorer": Full()}, r"critical\(full\): the inner score keeps everything"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Critical(**arguments)  # type: ignore[arg-type]
