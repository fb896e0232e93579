"""`fp8`: a scale per slot, relative precision, bytes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import Fp8
from tests.codec.common import sample, slots_like_keys, there_and_back


def test_bytes_of_one_slot() -> None:
    assert sum(field.bytes() for field in Fp8().fields("k", 128, torch.bfloat16)) == 130


def test_largest_magnitude_of_each_slot_maps_to_the_largest_code() -> None:
    """Slots of very different size come back alike: nothing overflows to NaN, nothing drowns."""
    x_RSD = torch.tensor([[[448.0, -224.0, 1.0], [4.48e-3, -2.24e-3, 1e-5], [4.48e6, -2.24e6, 1e4]]])
    torch.testing.assert_close(there_and_back(Fp8(), "v", x_RSD), x_RSD, rtol=2.0**-4, atol=0)


def test_zero_slot_stays_zero() -> None:
    x_RSD = torch.zeros(1, 2, 8)
    assert there_and_back(Fp8(), "v", x_RSD).equal(x_RSD)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), exponent=st.integers(-20, 28))
def test_error_is_relative_above_the_subnormals(seed: int, exponent: int) -> None:
    """e4m3: 3 bits of mantissa round by at most 2^-4; below 2^-6 scaled, by at most 2^-10 of the scale."""
    x_RSD = slots_like_keys(1, 5, 64, seed) * 10.0**exponent
    scale_N1 = Fp8().encode("v", sample(Fp8(), "v", x_RSD).slots, {})["scale"].float()
    error_ND = (there_and_back(Fp8(), "v", x_RSD) - x_RSD)[0].abs()
    assert (error_ND <= torch.maximum(x_RSD[0].abs() * 2.0**-4, scale_N1 * 2.0**-10) * (1 + 1e-4)).all()
