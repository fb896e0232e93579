"""`drop` and `merge`: against a plain loop over slots.

N slots of one head   K kept   D head dim
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.evicted import D2o, Drop, Evicted, Merge, Split, merge
from kvfold.policy.registry import terms


def split_of(num_slots: int, keep: list[int], head_dim: int = 8, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    k_ND, v_ND = torch.randn(2, num_slots, head_dim, generator=generator).unbind(0)
    keep_N = torch.zeros(num_slots, dtype=torch.bool)
    keep_N[keep] = True
    return Split(k_ND, v_ND, torch.arange(num_slots), keep_N)


def merged_by_loop(split: Split, threshold: float) -> Tensor:
    kept = [i for i, keep in enumerate(split.keep_N.tolist()) if keep]
    total = {j: split.v_ND[j].clone() for j in kept}
    share = dict.fromkeys(kept, 1.0)
    for i in range(len(split.keep_N)):
        if split.keep_N[i]:
            continue
        cosines = [float(torch.cosine_similarity(split.k_ND[i], split.k_ND[j], dim=0)) for j in kept]
        cosine, j = max(zip(cosines, kept, strict=True))
        if cosine < threshold:
            continue
        norm_i, norm_j = float(split.v_ND[i].norm()), float(split.v_ND[j].norm())
        weight = max(cosine, 0.0) * norm_i / (norm_i + norm_j)
        total[j] = total[j] + weight * split.v_ND[i]
        share[j] += weight
    return torch.stack([total[j] / share[j] for j in kept])


@pytest.mark.parametrize("way", [term.variant() for term in terms("evicted")], ids=[t.name for t in terms("evicted")])
@pytest.mark.parametrize("keep", [[], [2], [0, 3, 4], list(range(6))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_keeps_the_kept_slots_in_order(way: Evicted, keep: list[int], dtype: torch.dtype) -> None:
    split = split_of(6, keep)
    split.k_ND, split.v_ND = split.k_ND.to(dtype), split.v_ND.to(dtype)
    k_KD, v_KD = way.fold(split)
    assert k_KD.equal(split.k_ND[keep]) or (isinstance(way, D2o) and 0 < len(keep) < 6)
    assert (v_KD.dtype, v_KD.shape) == (dtype, k_KD.shape)
    if not way.folds or len(keep) == 6:
        assert v_KD.equal(split.v_ND[keep])


def test_drop_says_that_it_changes_nothing() -> None:
    assert (Drop().folds, Merge().folds) == (False, True)


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(1, 12),
    data=st.data(),
    seed=st.integers(0, 1 << 30),
    threshold=st.sampled_from([-1.0, 0.0, 0.3, 0.8]),
)
def test_merge_is_the_loop(num_slots: int, data: st.DataObject, seed: int, threshold: float) -> None:
    keep = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, unique=True))
    split = split_of(num_slots, keep, seed=seed)
    _, found = Merge(threshold).fold(split)
    torch.testing.assert_close(found, merged_by_loop(split, threshold), rtol=1e-4, atol=1e-5)


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_of(100, list(range(0, 100, 3)))
    _, whole = Merge().fold(split)
    monkeypatch.setattr(merge, "_CHUNK_ELEMENTS", 150)  # 34 kept: 4 evicted slots at a time
    _, chunked = Merge().fold(split)
    torch.testing.assert_close(chunked, whole)


def test_worked_merge() -> None:
    """Slot 1 (cosine 1, |v| 3) goes to slot 0 (|v| 1) with weight 3/4; slot 2 (cosine 0.6) to slot 3."""
    k_ND = torch.tensor([[2.0, 0.0], [5.0, 0.0], [-0.8, 0.6], [0.0, 1.0]])
    v_ND = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    split = Split(k_ND, v_ND, torch.arange(4), torch.tensor([True, False, False, True]))
    _, v_KD = Merge().fold(split)
    expected = torch.tensor([[1 / 1.75, 2.25 / 1.75], [0.6 / 1.3, 2.0 / 1.3]])
    torch.testing.assert_close(v_KD, expected)
    _, above = Merge(threshold=0.7).fold(split)
    torch.testing.assert_close(above, torch.stack((expected[0], v_ND[3])))


@pytest.mark.parametrize("side", ["k_ND", "v_ND"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_evicted_slot_is_dropped(side: str, bad: float) -> None:
    split = split_of(10, [0, 1, 2])
    without = Split(split.k_ND[:9], split.v_ND[:9], split.position_N[:9], split.keep_N[:9])
    getattr(split, side)[9, 0] = bad
    assert Merge().fold(split)[1].equal(Merge().fold(without)[1])


def test_a_broken_kept_key_attracts_nobody() -> None:
    split = split_of(10, [0, 1, 2])
    split.k_ND[1] = torch.nan
    found = Merge().fold(split)[1]
    assert found.isfinite().all()
    assert found[1].equal(split.v_ND[1])


def test_zero_values_do_not_divide_by_zero() -> None:
    split = split_of(4, [0, 1])
    split.v_ND.zero_()
    assert Merge().fold(split)[1].equal(torch.zeros(2, 8))


@pytest.mark.parametrize("threshold", [1.5, -2.0, float("nan")])
def test_threshold_must_be_a_cosine(threshold: float) -> None:
    with pytest.raises(PolicyError, match="is no cosine"):
        Merge(threshold=threshold)
