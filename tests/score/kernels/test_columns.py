"""Largest weights from the kernel, and from plain operations some queries at a time, equal those of the whole map.

R rows   S slots   D head dim   G query heads per KV head   T queries
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvfold.score import attention
from kvfold.score.attention import column_max_reference
from kvfold.score.kernels import are_taken, fused_column_max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 2, 70, 130, 64), (1, 3, 5, 300, 16), (3, 1, 64, 1, 32)]


def case(rows: int, group: int, queries: int, slots: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys cut out of longer rows, log-sum-exps over more than these slots, and the expected maxima."""
    torch.manual_seed(slots)
    q_RGTD = torch.randn(rows, group, queries, dim, device=DEVICE)
    k_RSD = torch.randn(slots + 7, rows, dim, device=DEVICE).transpose(0, 1)[:, 3 : slots + 3]
    logit_RGTS = torch.einsum("rgtd,rsd->rgts", q_RGTD, k_RSD) * 0.3
    lse_RGT = torch.logaddexp(logit_RGTS.logsumexp(-1), torch.randn(rows, group, queries, device=DEVICE))
    return q_RGTD, k_RSD, lse_RGT, (logit_RGTS - lse_RGT.unsqueeze(-1)).exp().amax(2)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_the_largest_weights(shape: tuple[int, int, int, int, int]) -> None:
    q_RGTD, k_RSD, lse_RGT, expected_RGS = case(*shape)
    torch.testing.assert_close(fused_column_max(q_RGTD, k_RSD, lse_RGT, 0.3), expected_RGS, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_queries_change_nothing(
    shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q_RGTD, k_RSD, lse_RGT, expected_RGS = case(*shape)
    monkeypatch.setattr(attention, "MAX_ENTRIES", 3 * expected_RGS.numel())  # three queries at a time
    torch.testing.assert_close(column_max_reference(q_RGTD, k_RSD, lse_RGT, 0.3), expected_RGS, atol=1e-5, rtol=1e-4)


def test_the_kernel_takes_16_bit_numbers_of_a_power_of_two() -> None:
    q, k = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 9, 64, dtype=torch.bfloat16)
    assert are_taken(q, k, most=256) and are_taken(q.half(), k.half(), most=256)
    assert not are_taken(q.float(), k.float(), most=256) and not are_taken(q.half(), k, most=256)
    assert not are_taken(q[..., :48], k[..., :48], most=256)
