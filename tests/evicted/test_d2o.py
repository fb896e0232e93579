"""`d2o`: against plain loops over slots, and worked by hand.

N slots of one head   K kept   D head dim
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.evicted import D2o, Split
from tests.evicted.test_merge import split_of


def d2o_by_loop(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    kept = [i for i, keep in enumerate(split.keep_N.tolist()) if keep]
    found = []
    for i in range(len(split.keep_N)):
        if not split.keep_N[i]:
            cosines = [float(torch.cosine_similarity(split.k_ND[i], split.k_ND[j], dim=0)) for j in kept]
            found.append((max(cosines), kept[cosines.index(max(cosines))], i))
    mean = sum(cosine for cosine, _, _ in found) / max(len(found), 1)
    rows = []
    for j in kept:
        mine = [(cosine, i) for cosine, near, i in found if near == j and cosine >= mean - 1e-6]
        k, v = (sum((c * x[i] for c, i in mine), start=x[j]) / (1 + len(mine)) for x in (split.k_ND, split.v_ND))
        rows.append((k, v))
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(1, 12), data=st.data(), seed=st.integers(0, 1 << 30))
def test_d2o_is_the_loop(num_slots: int, data: st.DataObject, seed: int) -> None:
    keep = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, unique=True))
    split = split_of(num_slots, keep, seed=seed)
    for found, expected in zip(D2o().fold(split), d2o_by_loop(split), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_worked_d2o() -> None:
    """Cosines 1 and 0.6, mean 0.8: slot 1 goes into slot 0, halfway; slot 2 is dropped."""
    k_ND = torch.tensor([[2.0, 0.0], [5.0, 0.0], [-0.8, 0.6], [0.0, 1.0]])
    v_ND = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    k_KD, v_KD = D2o().fold(Split(k_ND, v_ND, torch.arange(4), torch.tensor([True, False, False, True])))
    torch.testing.assert_close(k_KD, torch.tensor([[3.5, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(v_KD, torch.tensor([[0.5, 1.5], [0.0, 2.0]]))


@pytest.mark.parametrize("side", ["k_ND", "v_ND"])
def test_a_broken_evicted_slot_is_dropped(side: str) -> None:
    split = split_of(10, [0, 1, 9])
    getattr(split, side)[5, 0] = torch.nan
    assert all(x.isfinite().all() for x in D2o().fold(split))
