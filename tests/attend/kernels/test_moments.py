"""Sums over queries rotated back in the kernel equal turning them back in plain operations.

Q query heads   T queries   D head dim
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvfold.attend.kernels.moments import can_sum, summed
from kvfold.compression.observe import before_rope
from kvfold.core import LayerSpec, Rope
from kvfold.pages.observer_state import Moments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layer(dim: int, scale: float) -> LayerSpec:
    frequencies = tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2))
    return LayerSpec(2, 4, dim, 1.0, rope=Rope(frequencies, attention_scale=scale))


@pytest.mark.parametrize(("dim", "num_queries", "start", "scale"), [(32, 1100, 0, 1.0), (64, 50, 131_000, 1.3)])
def test_sums_equal_plain_operations(dim: int, num_queries: int, start: int, scale: float) -> None:
    spec = layer(dim, scale)
    assert spec.rope is not None
    torch.manual_seed(dim)
    q_QTD = torch.randn(num_queries, 4, dim, device=DEVICE).transpose(0, 1) + 1
    plain = Moments.empty(spec, DEVICE).plus(before_rope(spec, q_QTD, start))
    found = summed(q_QTD, spec.rope, start, plain.centre_QD, precision="ieee")
    torch.testing.assert_close(found.sum_QD, plain.sum_QD, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(found.outer_QDD, plain.outer_QDD, atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize("mean", [0.0, 60.0, 3000.0])
def test_a_large_mean_leaves_the_covariance_alone(mean: float) -> None:
    """Over several chunks, in plain operations and by the kernel, whose squares would drown in the mean."""
    spec = layer(32, 1.0)
    assert spec.rope is not None
    generator = torch.Generator().manual_seed(3)
    plain_QTD = torch.randn(4, 300, 32, generator=generator, dtype=torch.float64) + mean
    exact_QDD = torch.stack([q_TD.T.cov(correction=0) for q_TD in plain_QTD])
    by_plain = by_kernel = Moments.empty(spec, DEVICE)
    for begin in range(0, 300, 100):
        q_QTD = plain_QTD[:, begin : begin + 100].float().to(DEVICE)
        rotated = spec.rope.rotate(q_QTD, torch.arange(begin, begin + 100, device=DEVICE))
        by_plain = by_plain.plus(q_QTD)
        by_kernel = by_kernel.begun(q_QTD)
        sums = summed(rotated, spec.rope, begin, by_kernel.centre_QD, precision="ieee")
        by_kernel = by_kernel.plus_sums(100, *sums)
    for found, tolerance in ((by_plain, 2e-3), (by_kernel, max(2e-3, 2e-6 * mean))):
        mean_QD, cov_QDD = found.mean_and_covariance()
        assert (cov_QDD.cpu() - exact_QDD).abs().max() < tolerance
        assert (mean_QD.cpu() - plain_QTD.mean(1)).abs().max() < 1e-3 + 1e-6 * mean


@pytest.mark.skipif(DEVICE.type == "cpu", reason="TF32 is a GPU's")
def test_tf32_loses_less_than_the_queries_own_rounding() -> None:
    spec = layer(128, 1.0)
    assert spec.rope is not None
    q_QTD = torch.randn(4, 4096, 128, device=DEVICE).bfloat16()
    plain = Moments.empty(spec, DEVICE).plus(before_rope(spec, q_QTD, 7))
    found = summed(q_QTD, spec.rope, 7, plain.centre_QD)
    assert (found.outer_QDD - plain.outer_QDD).norm() < 2**-9 * plain.outer_QDD.norm()


def test_the_kernel_turns_whole_heads_by_halves() -> None:
    q_QTD = torch.zeros(2, 3, 64)
    whole = Rope((1.0,) * 32)
    assert can_sum(q_QTD, whole)
    assert not can_sum(q_QTD, Rope((1.0,) * 16)) and not can_sum(q_QTD, Rope((1.0,) * 32, interleaved=True))
    assert not can_sum(q_QTD[:, :0], whole)
