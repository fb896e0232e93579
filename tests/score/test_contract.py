"""What every scorer promises, over the whole registry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.budget import select_top
from kvfold.errors import InputError
from kvfold.policy.registry import terms
from kvfold.score import (
    H2O,
    NACL,
    RKV,
    Chunk,
    Compactor,
    Critical,
    Defensive,
    EpiCache,
    Expected,
    KeyDiff,
    KVzip,
    LagKV,
    LavaScore,
    Needs,
    Scissorhands,
    Scorer,
    SnapKV,
    Tree,
    View,
)
from tests.score.views import HEADS, make_view, sequence

VARIANTS: list[Scorer] = [
    SnapKV(window=5, kernel=3, pool="max", over_window="max", over_group="max"),
    SnapKV(window=40, pool="none", over_window="sum", over_group="sum"),
    H2O(correction="mean"),
    Critical(KeyDiff(), first=0.5, epsilon=0.01),
    Defensive(window=5, kernel=3, mass=0.5),
    KVzip(chunk=16, sinks=0),
    EpiCache(window=5),
    LavaScore(window=5, kernel=3),
    Expected(sinks=0, future=7, covariance=False, epsilon=0.01),
    Chunk(KeyDiff(), size=4, shared=False),
    Compactor(sinks=0, recent=1, block=16, blend=0.5),
    LagKV(sinks=2, lag=5),
    LagKV(sinks=0, lag=4, cross=True),
    NACL(proxies=5, share=0.5),
    RKV(window=3, kernel=1, mix=0.5, threshold=0.1),
    Scissorhands(history=6),
    Tree(sinks=0, recent=0.0),
]
SCORERS: list[Scorer] = [term.variant() for term in terms("score")] + VARIANTS

# Two long sequences and one shorter than snapkv's window; heads of one sequence hold different slots.
SEEN, LENS = (90, 20, 61), (60, 44, 20, 17, 61, 9)


@pytest.fixture(params=SCORERS, ids=str)
def scorer(request: pytest.FixtureRequest) -> Scorer:
    found: Scorer = request.param
    return found


def test_scores_depend_on_the_size_only_where_that_is_said(scorer: Scorer) -> None:
    view = make_view(SEEN, LENS, scorer.needs)
    few, many = (scorer.score(replace(view, slots_per_head=slots)) for slots in (6, 16))
    assert scorer.needs.size or torch.equal(view.masked(few), view.masked(many))


@pytest.fixture
def view(scorer: Scorer) -> View:
    return make_view(SEEN, LENS, scorer.needs)


def test_the_scorers_are_registered() -> None:
    names = (
        "a2sf chunk compactor expected fastgen full h2o keydiff knorm kvcompress lagkv nacl random recent rkv"
        " scissorhands snapkv streaming tova tree"
    )
    assert set(names.split()) <= {term.name for term in terms("score")}


def test_scores_are_fp32_and_padding_is_minus_infinity(scorer: Scorer, view: View) -> None:
    score_RS = scorer.score(replace(view, k_RSD=view.k_RSD.bfloat16(), v_RSD=view.v_RSD.bfloat16()))
    assert score_RS.dtype == torch.float32
    assert score_RS.shape == view.valid_RS.shape
    assert torch.equal(score_RS > -torch.inf, view.valid_RS)
    assert not score_RS.isnan().any()


def test_a_ragged_batch_equals_single_runs(scorer: Scorer, view: View) -> None:
    score_RS = scorer.score(view)
    for index in range(len(SEEN)):
        alone = sequence(view, index)
        alone_RS = scorer.score(alone)
        rows = score_RS[index * HEADS : (index + 1) * HEADS, : alone_RS.shape[1]]
        torch.testing.assert_close(rows, alone_RS, rtol=1e-6, atol=1e-7)
        half_R = (alone.len_R + 1) // 2
        assert torch.equal(select_top(rows, half_R), select_top(alone_RS, half_R))


def test_what_lies_in_the_padding_does_not_matter(scorer: Scorer, view: View) -> None:
    pad_RS1 = ~view.valid_RS.unsqueeze(-1)
    k_RSD, v_RSD = view.k_RSD.masked_fill(pad_RS1, torch.nan), view.v_RSD.masked_fill(pad_RS1, 1e30)
    assert torch.equal(scorer.score(replace(view, k_RSD=k_RSD, v_RSD=v_RSD)), scorer.score(view))


NEEDY = [scorer for scorer in SCORERS if replace(scorer.needs, sinks=0, recent=0) != Needs()]  # of the view


@pytest.mark.parametrize("needy", NEEDY, ids=str)
def test_a_missing_part_is_named(needy: Scorer) -> None:
    with pytest.raises(InputError, match=r"needs view\.\w+, which is missing"):
        needy.score(make_view((30,), (30, 30), Needs()))


def test_a_single_slot_can_be_scored(scorer: Scorer) -> None:
    score_RS = scorer.score(make_view((1,), (1, 1), scorer.needs))
    assert score_RS.shape == (HEADS, 1)
    assert not score_RS.isnan().any()
