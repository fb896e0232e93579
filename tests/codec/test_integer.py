"""`int8`, `int4`, `int2`: bytes, bounds, groups of channels.

R rows   S slots   N flat slots   D head dim
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import Int2, Int4, Int8
from kvfold.codec.hadamard import rotate
from kvfold.codec.integer import IntegerCodec
from kvfold.errors import PolicyError
from tests.codec.common import relative_error, sample, slots_like_keys, there_and_back

each = pytest.mark.parametrize("codec", [Int8(), Int4(), Int2()], ids=lambda codec: f"int{codec.bits}")


@pytest.mark.parametrize(("codec", "num_bytes"), [(Int8(), 132), (Int4(), 68), (Int2(), 36), (Int4(group_size=32), 80)])
def test_bytes_of_one_slot(codec: IntegerCodec, num_bytes: int) -> None:
    """128 channels: codes, and 4 bytes of scale and zero per group."""
    assert sum(field.bytes() for field in codec.fields("k", 128, torch.bfloat16)) == num_bytes


@pytest.mark.parametrize("group_size", [None, 32, 16])
@pytest.mark.parametrize("kind", [Int8, Int4])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_slots=st.integers(1, 7), exponent=st.integers(-20, 28))
def test_values_are_within_half_a_step(
    kind: type[IntegerCodec], group_size: int | None, seed: int, num_slots: int, exponent: int
) -> None:
    codec = kind(group_size=group_size)
    x_RSD = slots_like_keys(1, num_slots, 64, seed) * 10.0**exponent
    scale_NG = codec.encode("v", sample(codec, "v", x_RSD).slots, {})["scale"].float()
    allowed_ND = scale_NG.repeat_interleave(64 // scale_NG.shape[-1], -1) * (0.5 + 2.0**-14)
    rounding = x_RSD.abs().max() * 2.0**-20
    assert ((there_and_back(codec, "v", x_RSD) - x_RSD)[0].abs() <= allowed_ND + rounding).all()


def test_two_bits_reach_the_middle_of_the_span() -> None:
    """-1 .. 1 shrinks to -0.8 .. 0.8 in three steps; what lies outside comes back at the edge."""
    v_RSD = torch.tensor([[[-1.0, -0.3, 0.3, 1.0]]])
    expected = torch.tensor([[[-0.8, -0.8 / 3, 0.8 / 3, 0.8]]])
    torch.testing.assert_close(there_and_back(Int2(), "v", v_RSD), expected, rtol=0, atol=0.01)


@each
def test_constant_slots_come_back(codec: IntegerCodec) -> None:
    x_RSD = torch.tensor([0.0, 1.5, -7.3, 1e5]).view(1, 4, 1).expand(1, 4, 64)
    torch.testing.assert_close(there_and_back(codec, "v", x_RSD), x_RSD, rtol=2.0**-14, atol=0)


def test_mean_and_rotation_beat_the_bare_grid_on_biased_keys() -> None:
    k_RSD = slots_like_keys(2, 200, 64)
    bare = relative_error(there_and_back(Int4(), "v", k_RSD), k_RSD)
    kept = there_and_back(Int4(), "k", k_RSD)
    turned = (rotate(kept) + k_RSD.mean(1, keepdim=True) - k_RSD).norm() / k_RSD.norm()
    assert turned < bare / 2


def test_small_groups_are_finer() -> None:
    v_RSD = slots_like_keys(1, 50, 64)
    errors = [relative_error(there_and_back(Int4(group_size=size), "v", v_RSD), v_RSD) for size in (64, 16)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("group_size", [0, -32])
def test_group_size_must_be_positive(group_size: int) -> None:
    with pytest.raises(PolicyError, match="must be a positive number of channels"):
        Int4(group_size=group_size)


def test_group_size_must_divide_the_head_dim() -> None:
    with pytest.raises(PolicyError, match="group_size=32 does not divide the head dim 80"):
        Int4(group_size=32).fields("k", 80, torch.float32)
