"""Attention for AVX-512 is that of plain operations, whatever stands beside a row and wherever its slots lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kvfold.attend import lse_merge
from kvfold.attend.lse_merge import attend_reference
from kvfold.attend.stored_parts import IS_BF16, part_of
from kvfold.core import HAS_AVX512_KERNELS

if not HAS_AVX512_KERNELS:
    pytest.skip("needs AVX-512 and numba", allow_module_level=True)

from kvfold.attend.avx512_attention import CALL

attend, attend_parts, can_attend = CALL.attend, CALL.attend_parts, CALL.can_attend
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs(num_heads: int, group: int, num_queries: int, num_slots: int, head_dim: int) -> Inputs:
    """Queries as a model has them, token after token, and keys behind which there is other memory."""
    generator = torch.Generator().manual_seed(0)
    q_TQD = torch.randn(num_queries, num_heads * group, head_dim, generator=generator)
    k_HSD, v_HSD = (torch.randn(num_heads, num_slots + 3, head_dim, generator=generator) for _ in range(2))
    return q_TQD.transpose(0, 1).unflatten(0, (num_heads, group)), k_HSD[:, :num_slots], v_HSD[:, :num_slots]


SHAPES = [(1, 1, 1, 1, 16), (3, 3, 10, 1018, 64), (2, 1, 7, 9, 24), (1, 4, 100, 333, 80), (1, 7, 2, 129, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_plain_operations(
    shape: tuple[int, int, int, int, int], causal: bool, num_threads: int
) -> None:
    q, k, v = inputs(*shape)
    assert can_attend(q, k, v, 0.3)
    torch.testing.assert_close(
        attend(q, k, v, 0.3, causal=causal), attend_reference(q, k, v, 0.3, causal=causal), rtol=1e-5, atol=1e-5
    )


def test_large_scores_and_slots_that_count_for_nothing() -> None:
    q, k, v = inputs(1, 1, 20, 300, 32)
    q = q * 40
    torch.testing.assert_close(
        attend(q, k, v, 1.0, causal=True), attend_reference(q, k, v, 1.0, causal=True), rtol=1e-4, atol=1e-4
    )


def test_a_row_gives_the_same_bits_beside_any_others_and_in_any_chunk() -> None:
    q, k, v = inputs(2, 3, 200, 500, 64)
    whole, _ = attend(q, k, v, 0.1, causal=True)
    for begin, end in ((0, 1), (3, 40), (150, 200)):
        seen = 300 + end
        chunk, _ = attend(q[:, :, begin:end], k[:, :seen], v[:, :seen], 0.1, causal=True)
        assert torch.equal(chunk, whole[:, :, begin:end])


def test_slots_in_parts_give_the_bits_of_contiguous_ones() -> None:
    q, k, v = inputs(2, 3, 10, 500, 64)
    expected, expected_lse = attend(q, k, v, 0.1, causal=True)
    pieces = [(k[:, a:b].clone(), v[:, a:b].clone()) for a, b in ((0, 37), (37, 300), (300, 301), (301, 500))]
    parts = np.concatenate([part_of(*piece) for piece in pieces], axis=1)
    found, lse = attend_parts(q, parts, 0.1, (64, 64), causal=True)
    assert torch.equal(found, expected) and torch.equal(lse, expected_lse)


def test_parts_in_bf16_are_widened() -> None:
    q, k, v = inputs(2, 3, 10, 500, 64)
    before = [x[:, :290].bfloat16() for x in (k, v)]
    parts = part_of(k[:, :290], v[:, :290])
    for side, x_HSD in enumerate(before):
        parts[:, 0, side] = x_HSD.data_ptr() + 2 * x_HSD.stride(0) * np.arange(2)
    parts[:, 0, IS_BF16] = 1
    rest = k[:, 290:].clone(), v[:, 290:].clone()
    found, _ = attend_parts(q, np.concatenate((parts, part_of(*rest)), axis=1), 0.1, (64, 64), causal=True)
    wide_k, wide_v = (torch.cat((x.float(), y), dim=1) for x, y in zip(before, rest, strict=True))
    assert torch.equal(found, attend(q, wide_k, wide_v, 0.1, causal=True)[0])


def test_a_broken_slot_shows() -> None:
    q, k, v = inputs(1, 1, 16, 40, 16)
    k[0, 20, 3] = torch.nan
    found, lse = attend(q, k, v, 0.1, causal=False)
    assert found.isnan().all() and lse.isnan().all()


def test_it_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 3, 40, 90, 64)
    expected = attend(q, k, v, 0.1, causal=True)
    assert torch.equal(lse_merge.attend(q, k, v, 0.1, causal=True)[0], expected[0])
    assert not can_attend(q[..., :20], k[..., :20], v[..., :20], 0.1)
    assert not can_attend(q, k, v[..., :32], 0.1)
    assert not can_attend(q.requires_grad_(), k, v, 0.1) and not can_attend(q.detach(), k, v, -0.1)
    monkeypatch.setattr(lse_merge, "HAS_AVX512_KERNELS", False)
    torch.testing.assert_close(lse_merge.attend(q.detach(), k, v, 0.1, causal=True), expected, rtol=1e-5, atol=1e-5)
