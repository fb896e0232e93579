"""H2O: a traced step, and the position bias of summed attention.

R rows   S slots   T queries
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.budget import select_top
from kvfold.errors import PolicyError
from kvfold.protect import Protect
from kvfold.score import H2O, Needs, View
from tests.score.views import make_view


def mass_view(mass_S: Tensor, count_S: Tensor) -> View:
    num_slots = mass_S.shape[0]
    view = make_view((num_slots,), (num_slots, num_slots), Needs())
    return replace(view, mass_RS=mass_S.expand(2, -1), mass_count_RS=count_S.expand(2, -1))


@pytest.mark.parametrize("recent", [0, 1, 2])
def test_one_decode_step_evicts_the_lightest(recent: int) -> None:
    mass_S = torch.tensor([0.6, 0.2, 0.4, 0.0]) + torch.tensor([0.3, 0.1, 0.1, 0.5])
    view = mass_view(mass_S, torch.ones(4))
    protected_RS = Protect(sinks=0, recent=recent).mask(view.position_RS, view.seen_R)
    score_RS = H2O().score(view)
    torch.testing.assert_close(score_RS[0], torch.tensor([0.9, 0.3, 0.5, 0.5]))
    kept_RS = select_top(score_RS.masked_fill(protected_RS, torch.inf), torch.tensor([3, 3]))
    assert kept_RS[0].nonzero().flatten().tolist() == [0, 2, 3]
    torch.testing.assert_close(mass_S[kept_RS[0]], torch.tensor([0.9, 0.5, 0.5]))


def uniform_causal(n: int) -> View:
    attention_TS = torch.ones(n, n).tril() / torch.arange(1, n + 1).unsqueeze(-1)
    return mass_view(attention_TS.sum(0), torch.arange(n, 0, -1).float())


def test_summed_attention_favours_early_slots() -> None:
    score_S = H2O().score(uniform_causal(8))[0]
    column_sums = torch.tensor([2.7179, 1.7179, 1.2179, 0.8845, 0.6345, 0.4345, 0.2679, 0.125])
    torch.testing.assert_close(score_S, column_sums, rtol=0, atol=5e-5)
    assert abs(float(score_S.sum()) - 8) < 1e-5


def test_the_mean_corrects_only_partly() -> None:
    score_S = H2O(correction="mean").score(uniform_causal(8))[0]
    assert abs(float(score_S[0]) - 0.3397) < 5e-5
    assert float(score_S[7]) == 0.125
    assert (score_S.diff() < 0).all()


def test_a_slot_no_query_has_seen_scores_zero() -> None:
    score_S = H2O(correction="mean").score(mass_view(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])))[0]
    assert score_S.tolist() == [0.5, 0.0]


def test_bad_correction() -> None:
    with pytest.raises(PolicyError, match="correction must be one of none, mean"):
        H2O(correction="median")  # type: ignore[arg-type]
