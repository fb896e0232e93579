"""LagKV on blocks of two slots, and what has no block behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import LagKV, Needs, View
from tests.score.views import make_view

INF = torch.inf
# The second block spans 0..2 and 0..4: by that the first slot is (1, 0), spread 1/sqrt(2), the second (.5, .5), 0.
KEYS = [[2.0, 0.0], [1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [5.0, 5.0]]
# (.5, .5) and (-.5, .75): spreads 0 and 1.25/sqrt(2).
VALUES = [[1.0, 2.0], [-1.0, 3.0], [0.0, 4.0], [2.0, 0.0], [9.0, 9.0]]


def small_view(first: int = 0) -> View:
    view = make_view((5 + first,), (5, 5), Needs())
    return replace(
        view,
        k_RSD=torch.tensor(KEYS).expand(2, -1, -1),
        v_RSD=torch.tensor(VALUES).expand(2, -1, -1),
        position_RS=torch.arange(first, first + 5).expand(2, -1),
    )


def test_softmax_of_spreads_by_the_next_block() -> None:
    score_S = LagKV(sinks=0, lag=2, cross=True).score(small_view())[0]
    root = math.sqrt(2)
    keys = torch.tensor([1 / root, 0.0]).softmax(0)
    values = torch.tensor([0.0, 1.25 / root]).softmax(0)
    torch.testing.assert_close(score_S[:2], (keys + values) / 2)
    torch.testing.assert_close(score_S[2:], torch.tensor([1.4, 1.6, 1.8]))  # 1 + place / 5


def test_ranks_inside_the_block() -> None:
    """Keys favour the first slot, values the second, and more so."""
    assert LagKV(sinks=0, lag=2).score(small_view())[0, :2].tolist() == [0.0, 0.5]
    keys_only = replace(small_view(), v_RSD=small_view().k_RSD)
    assert LagKV(sinks=0, lag=2).score(keys_only)[0, :2].tolist() == [0.5, 0.0]


def test_sinks_are_told_by_position_and_blocks_start_behind_them() -> None:
    one = LagKV(sinks=1, lag=2).score(small_view())[0]
    assert one[0] == INF
    assert (one[1:3] < 1).all() and (one[3:] > 1).all()
    assert (LagKV(sinks=1, lag=2).score(small_view(first=7))[0] < INF).all()


def test_short_rows_keep_the_latest() -> None:
    score_S = LagKV(sinks=0, lag=3).score(small_view())[0]
    assert (score_S.diff() > 0).all() and (score_S >= 1).all()


def test_a_channel_that_does_not_vary_is_no_reason_to_fail() -> None:
    flat = replace(small_view(), k_RSD=torch.ones(2, 5, 2), v_RSD=torch.ones(2, 5, 2))
    assert LagKV(sinks=0, lag=2, cross=True).score(flat).isfinite().all()


@pytest.mark.parametrize(("arguments", "message"), [({"sinks": -1}, "sinks must be"), ({"lag": 1}, "lag must be")])
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        LagKV(**arguments)  # type: ignore[arg-type]
