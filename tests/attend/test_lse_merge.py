"""One part of attention equals the plain formula; parts, however cut, merge to the whole.

H KV heads   G query heads per KV head   T queries   S slots   D head dim
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge, attend, attend_reference


def draw(h: int, g: int, t: int, s: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((h, g, t, d), (h, s, d), (h, s, d))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    h=st.integers(1, 4),
    g=st.sampled_from([1, 2, 3, 7, 16]),
    t=st.integers(1, 70),
    s=st.integers(1, 150),
    d=st.sampled_from([48, 64, 96, 128]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_fast_path_equals_the_formula(h: int, g: int, t: int, s: int, d: int, masked: bool, seed: int) -> None:
    """Any mask, also of queries that see nothing: output 0, log-sum-exp -inf."""
    q, k, v = draw(h, g, t, s, d, seed)
    mask = torch.rand(t, s, generator=torch.Generator().manual_seed(seed)) < 0.1 if masked else None
    found = attend(q, k, v, d**-0.5, mask_TS=mask)
    assert_close(found, attend_reference(q, k, v, d**-0.5, mask_TS=mask))
    if mask is not None:
        blind = ~mask.any(-1)
        assert (found[0][:, :, blind] == 0).all() and (found[1][:, :, blind] == -torch.inf).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 130, 515])
@pytest.mark.parametrize("head_dim", [48, 128])
def test_causal(num_tokens: int, head_dim: int) -> None:
    q, k, v = draw(2, 3, num_tokens, num_tokens, head_dim)
    assert_close(attend(q, k, v, 0.1, causal=True), attend_reference(q, k, v, 0.1, causal=True))


def test_the_formula_by_hand() -> None:
    """One query, two slots with scores 0 and ln 3: weights 1/4 and 3/4, log-sum-exp ln 4."""
    k_HSD = torch.tensor([[[0.0], [math.log(3)]]])
    out, lse = attend_reference(torch.ones(1, 1, 1, 1), k_HSD, torch.tensor([[[4.0], [8.0]]]), 1.0)
    assert out.item() == pytest.approx(7.0) and lse.item() == pytest.approx(math.log(4))


def test_strided_views_read_the_same() -> None:
    """Uniform runs are views into pages with unused slots between heads, which may hold anything."""
    q, k, v = draw(3, 2, 4, 20, 64)
    k[:, 17:], v[:, 17:] = torch.nan, torch.nan
    out, lse = attend(q, k[:, :17], v[:, :17], 0.1)
    assert_close((out, lse), attend_reference(q, k[:, :17].clone(), v[:, :17].clone(), 0.1))


@settings(max_examples=60, deadline=None)
@given(
    h=st.integers(1, 4),
    s=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    by_head=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_parts_merge_to_the_whole(h: int, s: int, cuts: list[int], by_head: bool, seed: int) -> None:
    """Some parts are empty (nothing to see), some cover one head only, and scores differ by hundreds."""
    q, k, v = draw(h, 2, 5, s, 16, seed)
    k = k * 40
    borders = sorted({0, s, *(min(cut, s) for cut in cuts)})
    merge = LseMerge(q)
    for start, end in pairwise(borders):
        nothing = torch.zeros(5, end - start, dtype=torch.bool)
        for _ in range(2):
            merge.add(slice(0, h), *attend(q, k[:, start:end], v[:, start:end], 0.5, mask_TS=nothing))
        if by_head:
            for head in range(h):
                mine = slice(head, head + 1)
                merge.add(mine, *attend_reference(q[mine], k[mine, start:end], v[mine, start:end], 0.5))
        else:
            merge.add(slice(0, h), *attend_reference(q, k[:, start:end], v[:, start:end], 0.5))
    assert merge.lse_HGT is not None
    assert_close((merge.result(), merge.lse_HGT), attend_reference(q, k, v, 0.5))


def test_one_head_may_see_nothing() -> None:
    q, k, v = draw(2, 2, 3, 5, 16)
    merge = LseMerge(q)
    merge.add(slice(0, 1), *attend(q[:1], k[:1], v[:1], 0.5))
    assert (merge.result()[1] == 0).all()
    assert_close((merge.result()[:1], torch.empty(0)), (attend_reference(q[:1], k[:1], v[:1], 0.5)[0], torch.empty(0)))


def test_nothing_at_all_gives_zeros() -> None:
    q = torch.ones(2, 1, 3, 4)
    assert torch.equal(LseMerge(q).result(), torch.zeros(2, 1, 3, 4))


def test_many_parts_in_half_precision_lose_no_more_than_one() -> None:
    """The running sum is kept in fp32."""
    q, k, v = draw(1, 1, 1, 400, 16)
    merge = LseMerge(q.bfloat16())
    for at in range(400):
        out, lse = attend_reference(q, k[:, at : at + 1], v[:, at : at + 1], 0.3)
        merge.add(slice(0, 1), out.bfloat16(), lse)
    exact = attend_reference(q, k, v, 0.3)[0]
    rounded = torch.stack([v[0, at].bfloat16().float() for at in range(400)]).unsqueeze(0)
    at_best = attend_reference(q, k, rounded, 0.3)[0]
    assert (merge.result().float() - exact).abs().max() <= (at_best - exact).abs().max() + 2**-8 * exact.abs().max()
