"""Queries of centred keys from the kernel, against the codec's own."""

from __future__ import annotations

import pytest
import torch

from kvfold.attend.kernels import reference
from kvfold.codec import Int4
from tests.attend.kernels.common import DEVICE

query = pytest.importorskip("kvfold.attend.kernels.hadamard_query", reason="triton is not installed")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 6, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_those_of_the_codec(head_dim: int, num_queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim + num_queries)
    q_RXD = torch.randn(3, num_queries, head_dim, device=DEVICE).to(dtype)
    mean_RD = torch.randn(3, head_dim, device=DEVICE)
    rotated, offset = query.launch(q_RXD, mean_RD)
    expected, expected_offset = Int4().query(q_RXD, {"mean": mean_RD})
    assert rotated.dtype == dtype
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(rotated.float(), expected.float(), atol=loose, rtol=loose)
    torch.testing.assert_close(offset, expected_offset, atol=1e-4, rtol=1e-4)


def test_rows_that_follow_one_another_share_a_mean() -> None:
    q_RXD, mean_RD = torch.randn(6, 3, 64, device=DEVICE), torch.randn(2, 64, device=DEVICE)
    for found, want in zip(query.launch(q_RXD, mean_RD), reference.centred_query(q_RXD, mean_RD), strict=True):
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    mine = torch.einsum("vxd,d->vx", q_RXD[3:], mean_RD[1])
    torch.testing.assert_close(query.launch(q_RXD, mean_RD)[1][3:], mine, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_queries_in_larger_programs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "_MANY", 64)
    q_RXD, mean_RD = torch.randn(19, 4, 128, device=DEVICE).to(dtype), torch.randn(19, 128, device=DEVICE)
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for found, want in zip(query.launch(q_RXD, mean_RD), reference.centred_query(q_RXD, mean_RD), strict=True):
        torch.testing.assert_close(found, want, atol=loose, rtol=loose)
