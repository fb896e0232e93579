"""Softmax and window attention, on numbers small enough to read."""

from __future__ import annotations

import pytest
import torch

from kvfold.score.attention import masked_softmax, window_attention
from kvfold.score.base import Needs
from tests.score.views import make_view

INF = torch.inf


@pytest.mark.parametrize(
    ("logits", "visible", "expected"),
    [
        ([3, 1, 4, 0.5], [1, 1, 1, 1], [0.2541, 0.0344, 0.6907, 0.0209]),
        ([5, -2, -1.5, -1, 4.5], [1, 1, 1, 1, 1], [0.6206, 0.0006, 0.0009, 0.0015, 0.3764]),
        ([5, -2, -1.5, -1, 4.5], [0, 1, 1, 1, 1], [0.0, 0.0015, 0.0025, 0.0041, 0.9920]),
        ([5, 1], [0, 0], [0.0, 0.0]),
    ],
)
def test_masked_softmax(logits: list[float], visible: list[int], expected: list[float]) -> None:
    weight = masked_softmax(torch.tensor(logits), torch.tensor(visible, dtype=torch.bool))
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=0, atol=5e-5)


def test_window_attention_is_causal_and_each_query_spends_one() -> None:
    view = make_view((40,), (40, 40), Needs(last_queries=6))
    assert view.q_RGWD is not None and view.q_position_RW is not None
    weight_RGWS = window_attention(view, view.q_RGWD, view.q_position_RW)
    torch.testing.assert_close(weight_RGWS.sum(-1), torch.ones(weight_RGWS.shape[:3]))
    for query in range(6):
        assert (weight_RGWS[:, :, query, : 35 + query] > 0).all()
        assert (weight_RGWS[:, :, query, 35 + query :] == 0).all()


def test_window_attention_scales_by_the_layer_and_reads_one_key_per_group() -> None:
    view = make_view((12,), (12, 12), Needs(last_queries=1))
    assert view.q_RGWD is not None and view.q_position_RW is not None
    weight_RGWS = window_attention(view, view.q_RGWD, view.q_position_RW)
    by_hand = (view.k_RSD[1] @ view.q_RGWD[1, 2, 0] * view.spec.scale).softmax(0)
    torch.testing.assert_close(weight_RGWS[1, 2, 0], by_hand)


def test_padded_queries_see_nothing() -> None:
    view = make_view((3,), (3, 3), Needs(last_queries=5))
    assert view.q_RGWD is not None and view.q_position_RW is not None
    weight_RGWS = window_attention(view, view.q_RGWD, view.q_position_RW)
    assert view.q_position_RW[0].tolist() == [-1, -1, 0, 1, 2]
    assert (weight_RGWS[:, :, :2] == 0).all()
    torch.testing.assert_close(weight_RGWS[:, :, 2:].sum(-1), torch.ones(2, 3, 3))
