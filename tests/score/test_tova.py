"""TOVA: all heads of a sequence share the last query's vote."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvfold.score import TOVA, View
from kvfold.score.snapkv import mean_over_heads
from tests.score.views import make_view


def whole_view() -> View:
    return make_view((25, 25), (25, 25, 25, 25), TOVA().needs)


def test_mean_over_all_query_heads_of_the_sequence() -> None:
    view = whole_view()
    assert view.q_RGWD is not None
    logit_RGS = torch.einsum("rgd,rsd->rgs", view.q_RGWD[:, :, 0], view.k_RSD) * view.spec.scale
    by_hand_S = logit_RGS[2:].softmax(-1).mean(dim=(0, 1))  # second sequence: rows 2 and 3
    score_RS = TOVA().score(view)
    torch.testing.assert_close(score_RS[2, :24], by_hand_S[:24])
    assert torch.equal(score_RS[2], score_RS[3])
    assert not torch.equal(score_RS[0], score_RS[2])


def test_the_last_token_stays() -> None:
    score_RS = TOVA().score(whole_view())
    assert (score_RS == torch.inf).nonzero().tolist() == [[row, 24] for row in range(4)]


def test_only_the_last_of_several_queries_votes() -> None:
    view = whole_view()
    assert view.q_RGWD is not None and view.q_position_RW is not None
    q_RGWD = torch.cat((torch.randn_like(view.q_RGWD), view.q_RGWD), dim=2)
    q_position_RW = torch.cat((view.q_position_RW - 1, view.q_position_RW), dim=1)
    wider = replace(view, q_RGWD=q_RGWD, q_position_RW=q_position_RW)
    assert torch.equal(TOVA().score(wider), TOVA().score(view))


def test_heads_with_different_slots_vote_by_position() -> None:
    """Head 0 holds tokens 0, 2, 5, head 1 tokens 2 and 7 and one padded slot: they share token 2."""
    vote_RS = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])
    position_RS = torch.tensor([[0, 2, 5], [2, 7, 0]])
    shared_RS = mean_over_heads(vote_RS, position_RS, num_heads=2)
    torch.testing.assert_close(shared_RS[:, :2], torch.tensor([[0.1, 0.45], [0.45, 0.2]]))
    torch.testing.assert_close(shared_RS[0, 2], torch.tensor(0.25))
