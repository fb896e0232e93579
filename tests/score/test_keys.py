"""Scorers that look at keys alone: knorm and keydiff."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.score import KeyDiff, KNorm, Needs, View
from tests.score.views import make_view


def keys_view(k_SD: Tensor) -> View:
    view = make_view((k_SD.shape[0],), (k_SD.shape[0],) * 2, Needs())
    return replace(view, k_RSD=k_SD.expand(2, -1, -1))


def test_knorm_prefers_small_keys() -> None:
    score_S = KNorm().score(keys_view(torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]])))[0]
    torch.testing.assert_close(score_S, torch.tensor([-5.0, -1.0, 0.0]))


def test_knorm_of_bf16_keys_is_taken_in_fp32() -> None:
    k_SD = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    score_S = KNorm().score(keys_view(k_SD))[0]
    assert len(set(score_S.tolist())) > 1950
    assert len(set(k_SD.norm(dim=-1).tolist())) < 500


def test_keydiff_prefers_the_odd_key_whatever_its_length() -> None:
    k_SD = torch.tensor([[1.0, 0.0], [7.0, 0.0], [2.0, 0.0], [0.0, 0.1]])
    score_S = KeyDiff().score(keys_view(k_SD))[0]
    # Mean of the unit keys is (3/4, 1/4): cosines 3/sqrt(10) three times, and 1/sqrt(10).
    torch.testing.assert_close(score_S, -torch.tensor([3.0, 3.0, 3.0, 1.0]) / 10**0.5)


def test_keydiff_of_keys_that_cancel_is_finite() -> None:
    score_S = KeyDiff().score(keys_view(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])))[0]
    assert score_S.isfinite().all()
