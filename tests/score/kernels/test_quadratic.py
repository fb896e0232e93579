"""Expected logits from the kernel equal mean and quadratic form in plain operations.

R rows   S slots   D head dim   G query heads per KV head
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvfold.score.expected import quadratic
from kvfold.score.kernels import are_taken, expected_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.125
# The interpreter multiplies the bits of bf16 as if they were integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "group", "slots", "dim"), [(2, 3, 70, 64), (1, 1, 200, 16)])
def test_logits_equal_the_formula(dtype: torch.dtype, rows: int, group: int, slots: int, dim: int) -> None:
    """Also in 16 bits: what rounding C would lose is carried along, so the error is far below 2^-9."""
    torch.manual_seed(slots)
    k_RSD = torch.randn(slots, rows, dim, device=DEVICE).transpose(0, 1).to(dtype)
    mean_RGD = torch.randn(rows, group, dim, device=DEVICE)
    factor = torch.randn(rows, group, dim, dim, device=DEVICE)
    cov_RGDD = factor @ factor.transpose(-1, -2)
    found_RGS = expected_logits(k_RSD, mean_RGD, cov_RGDD, SCALE)
    wide = k_RSD.float()
    plain_RGS = torch.einsum("rgd,rsd->rgs", mean_RGD, wide) * SCALE + quadratic(wide, cov_RGDD) * (SCALE**2 / 2)
    torch.testing.assert_close(found_RGS, plain_RGS, atol=2e-4, rtol=1e-4)


def test_the_kernel_takes_16_bit_keys_of_a_power_of_two() -> None:
    k = torch.zeros(1, 9, 64, dtype=torch.bfloat16)
    assert are_taken(k) and are_taken(k.half())
    assert not are_taken(k.float()) and not are_taken(k[..., :48])
