"""R-KV: repetitions by hand, importance by hand, and their mix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import RKV, rkv
from kvfold.score.rkv import mean_cosine
from tests.score.votes import votes_view

VALID = torch.ones(1, 5, dtype=torch.bool)
# Slots 0, 1 and 2 say the same, at different lengths; 3 and 4 say something else each.
KEYS = torch.tensor([[[1.0, 0, 0], [2, 0, 0], [3, 0, 0], [0, 1, 0], [0, 0, 1]]])


def test_all_but_the_latest_repetition_are_redundant() -> None:
    """Latest resembling slot: 2 for 0 and 1, 1 for 2. Left are the cosines of 1 and 2 with 0 and of 0 with 1."""
    torch.testing.assert_close(mean_cosine(KEYS, VALID, 0.5), torch.tensor([[0.4, 0.2, 0, 0, 0]]))


def test_below_the_threshold_nothing_is_left_out() -> None:
    """Cosines of 0.6 count as repetitions from a threshold below that on."""
    keys = torch.tensor([[[1.0, 0.0], [0.6, 0.8]]])
    torch.testing.assert_close(mean_cosine(keys, VALID[:, :2], 0.7), torch.tensor([[0.3, 0.3]]))
    torch.testing.assert_close(mean_cosine(keys, VALID[:, :2], 0.5), torch.tensor([[0.0, 0.0]]))


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(2, 37, 4, generator=torch.Generator().manual_seed(0))
    valid_RS = torch.arange(37) < torch.tensor([[37], [20]])
    whole_RS = mean_cosine(keys, valid_RS, 0.5)
    monkeypatch.setattr(rkv, "_TILE", 5)
    torch.testing.assert_close(mean_cosine(keys, valid_RS, 0.5), whole_RS)


def test_importance_is_softmax_over_the_slots_before_the_window() -> None:
    """The group's louder head decides each logit before softmax: votes above 1 squared, votes below 1 as they are."""
    view = votes_view([0.5, 2, 3, 1, 7], 1)
    assert view.q_RGWD is not None
    both = replace(view, q_RGWD=torch.cat((view.q_RGWD, view.q_RGWD * 2), dim=1))
    score_S = RKV(window=1, kernel=1, mix=1.0).score(both)[0]
    torch.testing.assert_close(score_S[:4], torch.tensor([0.5, 4, 9, 1]) / 14.5)
    assert score_S[4] == torch.inf
    pooled_S = RKV(window=1, kernel=3, mix=1.0).score(both)[0]
    torch.testing.assert_close(pooled_S[:4], torch.tensor([4.0, 9, 9, 9]) / 14.5)


def test_the_mix() -> None:
    view = replace(votes_view([1.0] * 5, 1), k_RSD=KEYS, v_RSD=KEYS, q_RGWD=torch.zeros(1, 1, 1, 3))
    score_S = RKV(window=1, kernel=1, mix=0.25).score(view)[0]
    redundant_S = torch.tensor([2 / 5, 1 / 5, 0, 0, 0]).softmax(0)
    torch.testing.assert_close(score_S[:4], 0.25 * 0.25 - 0.75 * redundant_S[:4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"kernel": 2}, "kernel must be odd"),
        ({"mix": 1.1}, "mix must be from 0 to 1"),
        ({"threshold": -0.1}, "threshold must be from 0 to 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        RKV(**arguments)  # type: ignore[arg-type]
