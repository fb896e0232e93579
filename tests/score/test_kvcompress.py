"""KV-Compress: squares, pooled and summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import KVCompress, SnapKV
from tests.score.votes import votes_view

VOTES = [1.0, 2, 3, 2, 1, 1]  # the last two are the window: 9 votes in sight of the first query, 10 of the second


@pytest.mark.parametrize(("kernel", "best"), [(1, [1.0, 4, 9, 4]), (3, [4.0, 9, 9, 9])])
def test_squared_weights_are_summed_over_the_window_then_pooled(kernel: int, best: list[float]) -> None:
    score_S = KVCompress(window=2, kernel=kernel).score(votes_view(VOTES, 2))[0]
    torch.testing.assert_close(score_S[:4], torch.tensor(best) * (1 / 81 + 1 / 100))
    assert score_S[4:].tolist() == [torch.inf] * 2


def test_the_group_is_summed() -> None:
    """The second head attends by the squares of the votes: 19 and 20 in sight."""
    view, loud = votes_view(VOTES, 2), votes_view(VOTES, 2, loudness=2.0)
    assert view.q_RGWD is not None and loud.q_RGWD is not None
    both = replace(view, q_RGWD=torch.cat((view.q_RGWD, loud.q_RGWD), dim=1))
    score_S = KVCompress(window=2, kernel=1).score(both)[0]
    votes = torch.tensor(VOTES[:4])
    torch.testing.assert_close(score_S[:4], votes**2 * (1 / 81 + 1 / 100) + votes**4 * (1 / 361 + 1 / 400))


def test_one_query_in_need_beats_two_that_glance() -> None:
    """Slot 0 gets 1/2 of one query, slot 1 a quarter of each of two: equal sums, unequal squares."""
    far = -30.0  # the logarithm of no votes
    k_RSD = torch.tensor([[[0.0, far], [-0.7, -0.7], [0.0, -0.3], [far, 0.0], [far, far]]])
    view = replace(votes_view([1.0] * 5, 2), k_RSD=k_RSD, v_RSD=k_RSD, q_RGWD=torch.eye(2).view(1, 1, 2, 2))
    plain = SnapKV(window=2, pool="none").score(view)[0]
    squared = KVCompress(window=2, kernel=1).score(view)[0]
    assert plain[0] < plain[1]
    assert squared[0] > squared[1]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"window": 0}, "window must be at least 1"), ({"kernel": 4}, "kernel must be odd")]
)
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        KVCompress(**arguments)
