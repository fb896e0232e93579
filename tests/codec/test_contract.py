"""What every registered codec promises: the rules of `kvfold.testing.check_codec`, run over the registry."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec.base import SIDES, Side
from kvfold.testing import check_codec
from kvfold.testing.codec import HEAD_DIMS, numbers_survive
from tests.codec.common import CODECS

# Relative error of q.k and of the values that no run on normal data with biased channels reaches.
TOLERANCE = {
    "native": 0.0,
    "bf16": 0.004,
    "fp8": 0.04,
    "int8": 0.01,
    "int4": 0.12,
    "int2": 0.6,
    "kivi4": 0.1,
    "kivi2": 0.5,
}


def test_the_registry_holds_the_promised_codecs() -> None:
    assert set(CODECS) == set(TOLERANCE)


@pytest.mark.parametrize("name", CODECS)
def test_the_contract(name: str) -> None:
    check_codec(CODECS[name], tolerance=TOLERANCE[name])


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if not codec.as_floats])
@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=40, deadline=None)
@given(
    num_groups=st.integers(0, 3),
    odd=st.integers(0, 31),
    exponent=st.integers(-44, 38),
    head_dim=st.sampled_from(HEAD_DIMS),
    seed=st.integers(0, 1 << 30),
)
def test_any_count_and_size_of_numbers_survives(
    name: str, side: Side, num_groups: int, odd: int, exponent: int, head_dim: int, seed: int
) -> None:
    numbers_survive(CODECS[name], side, num_groups, odd, exponent, head_dim, seed)
