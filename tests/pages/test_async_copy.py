"""Facts cross between host and device unchanged, and indices of a known number equal `nonzero`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.pages.async_copy import Download, indices, row_numbers, upload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60))
def test_indices_equal_nonzero(mask: list[bool]) -> None:
    mask_X = torch.tensor(mask, dtype=torch.bool, device=DEVICE)
    assert torch.equal(indices(mask_X, sum(mask)), mask_X.nonzero().squeeze(-1))


def test_rows_are_numbered_as_often_as_they_count() -> None:
    assert row_numbers([2, 0, 3], DEVICE).tolist() == [0, 0, 2, 2, 2]
    assert row_numbers([0, 0], DEVICE).tolist() == []


def test_numbers_come_back_as_they_went() -> None:
    there = upload([3, -1, 1 << 40], DEVICE)
    assert there.device.type == DEVICE.type
    later = Download(there * 2)
    there.zero_()  # queued behind the copy, so it changes nothing
    assert later.wait().tolist() == [6, -2, 1 << 41]
