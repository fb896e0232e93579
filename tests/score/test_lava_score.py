"""LAVa's score against a plain formulation, one head and one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.budget import Budget, Lava
from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.score import LavaScore, View
from tests.budget.scores import allocated
from tests.score.views import GROUP, HEADS, SPEC, make_view

LEN, WINDOW = 40, 6
BEFORE = LEN - WINDOW


def the_view() -> View:
    return make_view((LEN,), (LEN, LEN), LavaScore(window=WINDOW).needs, seed=3)


def reference(view: View, kernel: int) -> Tensor:
    """s_hj = max over the group of maxpool(mean over the window of softmax(q k))_j * max_j |v_hj|_1, j < L - w."""
    assert view.q_RGWD is not None
    rows = []
    for head in range(HEADS):
        k_SD, v_SD = view.k_RSD[head], view.v_RSD[head]
        largest = max(float(v_D.abs().sum()) for v_D in v_SD[:BEFORE])
        pooled = []
        for group in range(GROUP):
            mean_S = torch.zeros(BEFORE)
            for w in range(WINDOW):
                seen = BEFORE + w + 1
                logit = k_SD[:seen] @ view.q_RGWD[head, group, w] * SPEC.scale
                mean_S += torch.softmax(logit, 0)[:BEFORE] / WINDOW
            half = kernel // 2
            pooled.append(torch.stack([mean_S[max(0, j - half) : j + half + 1].max() for j in range(BEFORE)]))
        rows.append(torch.stack(pooled).amax(0) * largest)
    return torch.stack(rows)


@pytest.mark.parametrize("kernel", [1, 7])
def test_scores_are_the_reference(kernel: int) -> None:
    view = the_view()
    score_RS = LavaScore(WINDOW, kernel).score(view)
    torch.testing.assert_close(score_RS[:, :BEFORE], reference(view, kernel))
    assert (score_RS[:, BEFORE:] == torch.inf).all()


def test_large_values_move_slots_to_their_head() -> None:
    """One head's values ten times as large: the order inside heads stays, the layer's slots go to that head."""
    view = the_view()
    plain_RS = LavaScore(WINDOW).score(view)
    view.v_RSD[0] *= 10
    loud_RS = LavaScore(WINDOW).score(view)
    assert torch.equal(loud_RS[1], plain_RS[1])
    torch.testing.assert_close(loud_RS[0, :BEFORE], 10 * plain_RS[0, :BEFORE])
    few, many = (allocated(Lava(), [score_RS], Budget(12, 1), 0)[0][0] for score_RS in (plain_RS, loud_RS))
    assert many > few


def test_values_of_the_window_do_not_count() -> None:
    view = the_view()
    plain_RS = LavaScore(WINDOW).score(view)
    view.v_RSD[:, BEFORE:] *= 100
    assert torch.equal(LavaScore(WINDOW).score(view), plain_RS)


def test_the_score_and_the_budget_stand_together() -> None:
    policy = Policy.parse("lava_score + lava + 8x")
    assert (policy.prefill.score, policy.prefill.budget) == (LavaScore(), Lava())
    assert (LavaScore().window, LavaScore().kernel) == (32, 7)  # the authors' defaults


@pytest.mark.parametrize(
    ("arguments", "message"), [({"window": 0}, "window must be at least 1"), ({"kernel": 4}, "kernel must be odd")]
)
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        LavaScore(**arguments)
