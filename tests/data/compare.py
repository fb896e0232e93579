"""Compares a selection with its reference: equal sets, except where scores tie at the border.

H heads   S slots
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_kept(ours_HS: Tensor, theirs_HS: Tensor, score_HS: Tensor, ties: bool) -> None:
    """Both keep equally many; without `ties` the same ones, with them the same up to slots of the border's score."""
    if not ties:
        assert torch.equal(ours_HS, theirs_HS)
        return
    assert torch.equal(ours_HS.sum(-1), theirs_HS.sum(-1))
    border_H = score_HS.masked_fill(~ours_HS, torch.inf).amin(-1, keepdim=True)
    differ_HS = ours_HS != theirs_HS
    gap_HS = (score_HS - border_H).abs()[differ_HS]
    assert (gap_HS <= 1e-5 * border_H.abs().expand_as(score_HS)[differ_HS]).all()
