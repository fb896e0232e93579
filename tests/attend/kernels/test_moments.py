"""Sums over queries turned back in the kernel equal turning them back in plain operations.

Q query heads   T queries   D head dim
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvfold.attend.kernels.moments import can_sum, summed
from kvfold.attend.track import before_rope
from kvfold.core import LayerSpec, Rope
from kvfold.pages.sidecar import Moments

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
    found = summed(q_QTD, spec.rope, start, precision="ieee")
    plain = Moments.empty(spec, DEVICE).plus(before_rope(spec, q_QTD, start))
    torch.testing.assert_close(found.sum_QD, plain.sum_QD, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(found.outer_QDD, plain.outer_QDD, atol=2e-2, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="TF32 is a GPU's")
def test_tf32_loses_less_than_the_queries_own_rounding() -> None:
    spec = layer(128, 1.0)
    assert spec.rope is not None
    q_QTD = torch.randn(4, 4096, 128, device=DEVICE).bfloat16()
    found, plain = summed(q_QTD, spec.rope, 7), Moments.empty(spec, DEVICE).plus(before_rope(spec, q_QTD, 7))
    assert (found.outer_QDD - plain.outer_QDD).norm() < 2**-9 * plain.outer_QDD.norm()


def test_the_kernel_turns_whole_heads_by_halves() -> None:
    q_QTD = torch.zeros(2, 3, 64)
    whole = Rope((1.0,) * 32)
    assert can_sum(q_QTD, whole)
    assert not can_sum(q_QTD, Rope((1.0,) * 16)) and not can_sum(q_QTD, Rope((1.0,) * 32, interleaved=True))
    assert not can_sum(q_QTD[:, :0], whole)
