"""Codes in bytes: the drawn layout, and that nothing gets lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.codec import packing
from kvfold.errors import PolicyError


def test_four_bits_split_into_halves() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    assert packing.pack(codes, 4).tolist() == [[0x51, 0x62, 0x73, 0xF4]]


def test_two_bits_split_into_quarters() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 1, 0, 3, 3]], dtype=torch.uint8)
    assert packing.pack(codes, 2).tolist() == [[0b11_01_10_00, 0b11_00_11_01]]


@given(
    bits=st.sampled_from([8, 4, 2]),
    num_slots=st.integers(0, 9),
    quads=st.integers(1, 20),
    seed=st.integers(0, 1 << 30),
)
def test_unpack_undoes_pack(bits: int, num_slots: int, quads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (num_slots, 4 * quads), generator=generator).to(torch.uint8)
    packed = packing.pack(codes, bits)
    assert packed.shape == (num_slots, packing.packed_width(4 * quads, bits))
    assert packing.unpack(packed, bits).equal(codes)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(PolicyError, match="head dim 66 does not fill bytes of 4 codes"):
        packing.packed_width(66, 2)
