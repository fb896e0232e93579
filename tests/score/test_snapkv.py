"""SnapKV on a votes vector that can be pooled by hand.

Keys are the logarithms of the votes and every query is 1, so attention is proportional to the votes.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from kvfold.budget import Budget, Uniform, select_top
from kvfold.errors import PolicyError
from kvfold.score import SnapKV, View, attention
from tests.budget.scores import allocated
from tests.score.views import make_view
from tests.score.votes import votes_view

VOTES = [0.1, 0.4, 0.5, 0.3, 0, 0.1, 0.8, 0.7, 0.6, 0.2, 0, 0, 0.1, 0.3, 0.4, 0.2, 0, 0.5, 0.6, 0]
WINDOW = 4


def kept(scorer: SnapKV, slots: int) -> list[int]:
    score_RS = scorer.score(votes_view(VOTES, WINDOW))
    (count_H,) = allocated(Uniform(), [score_RS], Budget(slots, 1), 0)
    return select_top(score_RS, count_H)[0].nonzero().flatten().tolist()


def test_pooled_votes() -> None:
    score_S = SnapKV(window=WINDOW, kernel=3, pool="max").score(votes_view(VOTES, WINDOW))[0]
    pooled = [0.4, 0.5, 0.5, 0.5, 0.3, 0.8, 0.8, 0.8, 0.7, 0.6, 0.2, 0.1, 0.3, 0.4, 0.4, 0.4]
    torch.testing.assert_close(score_S[:16] / score_S[5] * 0.8, torch.tensor(pooled), rtol=0, atol=1e-5)
    assert (score_S[16:] == torch.inf).all()


@pytest.mark.parametrize(
    ("pool", "kernel", "voted"),
    [
        ("max", 3, [5, 6, 7, 8]),
        ("none", 5, [2, 6, 7, 8]),
        ("avg", 1, [2, 6, 7, 8]),
        ("avg", 3, [2, 6, 7, 8]),
        ("avg", 5, [5, 6, 7, 8]),
        ("max", 5, [4, 5, 6, 7]),
    ],
)
def test_four_voted_slots_and_the_window(pool: Literal["avg", "max", "none"], kernel: int, voted: list[int]) -> None:
    """8 of 20 slots, 2.5x; slot 18, the third highest vote, lies in the window and costs no candidate its place."""
    assert kept(SnapKV(window=WINDOW, kernel=kernel, pool=pool), 8) == [*voted, 16, 17, 18, 19]


def test_mean_and_sum_over_the_window_rank_alike() -> None:
    view, mean, total = votes_view(VOTES, WINDOW), SnapKV(window=WINDOW), SnapKV(window=WINDOW, over_window="sum")
    torch.testing.assert_close(mean.score(view)[0, :16] * WINDOW, total.score(view)[0, :16])


def test_max_over_the_group_hears_the_loudest_head() -> None:
    scorer = SnapKV(window=4, pool="none", over_group="max")
    view = make_view((30,), (30, 30), scorer.needs)
    assert view.q_RGWD is not None
    each = [scorer.score(_one_head(view, head)) for head in range(3)]
    torch.testing.assert_close(scorer.score(view), torch.stack(each).amax(0))


def _one_head(view: View, head: int) -> View:
    assert view.q_RGWD is not None
    return View(**{**vars(view), "q_RGWD": view.q_RGWD[:, head : head + 1]})


def test_a_prompt_shorter_than_the_window_is_all_kept() -> None:
    scorer = SnapKV(window=32)
    assert (scorer.score(make_view((20,), (20, 20), scorer.needs)) == torch.inf).all()


def test_mean_over_the_window_counts_real_queries_only() -> None:
    """One query before the window's end: a left-padded window of 1 real query votes as that query alone."""
    short, padded = SnapKV(window=1, pool="none"), SnapKV(window=3, pool="none")
    view = make_view((30,), (30, 30), short.needs)
    assert view.q_RGWD is not None and view.q_position_RW is not None
    q_RGWD = torch.cat((torch.randn(2, 3, 2, 8), view.q_RGWD), dim=2)
    q_position_RW = torch.cat((torch.full((2, 2), -1), view.q_position_RW), dim=1)
    wide = View(**{**vars(view), "q_RGWD": q_RGWD, "q_position_RW": q_position_RW})
    torch.testing.assert_close(padded.score(wide), short.score(view))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = SnapKV(window=4)
    view = make_view((30, 25), (30, 30, 25, 20), scorer.needs)
    whole_RS = scorer.score(view)
    monkeypatch.setattr(attention, "MAX_ENTRIES", 3 * 3 * 4 * 30)  # three rows of a group of 3, then one
    assert [rows.stop - rows.start for rows in attention.row_blocks(4, 3 * 4 * 30)] == [3, 3]
    torch.testing.assert_close(scorer.score(view), whole_RS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, r"snapkv\(window=0\): window must be at least 1"),
        ({"kernel": 4}, r"snapkv\(kernel=4\): kernel must be odd"),
        ({"pool": "min"}, r"pool must be one of avg, max, none"),
        ({"over_group": "median"}, r"over_group must be one of mean, sum, max"),
        ({"over_window": "last"}, r"over_window must be one of mean, sum, max"),
    ],
)
def test_bad_arguments(arguments: dict[str, int | str], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        SnapKV(**arguments)  # type: ignore[arg-type]
