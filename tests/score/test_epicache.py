"""EpiCache's score: the patch's softmax runs over past keys alone."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import EpiCache, SnapKV
from tests.score.views import GROUP, HEADS, SPEC, make_view
from tests.score.votes import votes_view

WINDOW = 6


def test_scores_are_the_largest_weight_among_past_keys() -> None:
    """Sequences of 40 and 30 tokens, the heads with slots missing."""
    lens = (40, 31, 30, 12)
    view = make_view((40, 30), lens, EpiCache(window=WINDOW).needs, seed=1)
    assert view.q_RGWD is not None
    score_RS = EpiCache(window=WINDOW).score(view)
    for row, length in enumerate(lens):
        start = int(view.seen_R[row]) - WINDOW
        past = [slot for slot in range(length) if int(view.position_RS[row, slot]) < start]
        largest = torch.zeros(len(past))
        for group in range(GROUP):
            for w in range(WINDOW):
                logit = view.k_RSD[row, past] @ view.q_RGWD[row, group, w] * SPEC.scale
                largest = largest.maximum(torch.softmax(logit, 0))
        torch.testing.assert_close(score_RS[row, past], largest)
        assert (score_RS[row, len(past) : length] == torch.inf).all()
    assert score_RS.shape[0] == 2 * HEADS


def test_a_query_that_looks_at_its_own_window_votes_as_loudly() -> None:
    """Slots 0 to 3 are the past, with 1 2 3 2 votes of the 8; the window's own slots have thousands."""
    view = votes_view([1.0, 2, 3, 2, 5000, 9000], 2)
    assert EpiCache(window=2).score(view)[0, :4].tolist() == pytest.approx([1 / 8, 2 / 8, 3 / 8, 2 / 8])
    drowned = SnapKV(window=2, pool="none", over_window="max").score(view)[0, :4]
    assert float(drowned.max()) < 0.001


def test_a_prompt_within_the_window_has_no_past() -> None:
    view = votes_view([1.0, 2, 3], 3)
    assert EpiCache(window=3).score(view)[0].tolist() == [torch.inf] * 3


def test_bad_arguments() -> None:
    with pytest.raises(PolicyError, match="window must be at least 1"):
        EpiCache(window=0)
