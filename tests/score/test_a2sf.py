"""A2SF: two queries by hand, and how far back it looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import A2SF
from tests.score.votes import votes_view


def test_the_earlier_query_counts_alpha_times() -> None:
    """The last query gives 1/8, 2/8, 3/8, 2/8, the one before 1/6, 2/6, 3/6; the latter count half."""
    score_S = A2SF(alpha=0.5).score(votes_view([1, 2, 3, 2], 2))[0]
    torch.testing.assert_close(score_S, torch.tensor([5 / 24, 10 / 24, 15 / 24, 6 / 24]))


def test_the_group_is_summed() -> None:
    view = votes_view([1, 2, 3, 2], 2)
    assert view.q_RGWD is not None
    wide = replace(view, q_RGWD=view.q_RGWD.expand(-1, 3, -1, -1))
    torch.testing.assert_close(A2SF().score(wide), A2SF().score(view) * 3)


@pytest.mark.parametrize(("alpha", "window"), [(0.95, 135), (0.5, 10), (0.1, 3), (0.0001, 1)])
def test_queries_left_out_weigh_less_than_a_thousandth(alpha: float, window: int) -> None:
    needs = A2SF(alpha).needs
    assert needs.last_queries == window
    assert needs.window == 0  # it looks at these tokens and may drop them
    assert alpha**window <= 1e-3 * 1.001


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
def test_bad_alpha(alpha: float) -> None:
    with pytest.raises(PolicyError, match=r"alpha must be above 0 and at most 0\.999"):
        A2SF(alpha)
