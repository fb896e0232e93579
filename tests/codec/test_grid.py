"""The uniform grid: worked numbers, error bounds, and what becomes of numbers no grid can hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.codec import grid

RAMP = torch.tensor([[-1.0, -0.5, 0.0, 0.5, 1.0]])
BITS = pytest.mark.parametrize("bits", [8, 4, 2])
floats = st.floats(-(2.0**100), 2.0**100, width=32)
groups = st.lists(st.lists(floats, min_size=6, max_size=6), min_size=1, max_size=5)


def back(x: Tensor, kept: grid.Grid, bits: int) -> Tensor:
    return grid.to_codes(x, kept, bits) * kept.scale.float() + kept.zero.float()


@pytest.mark.parametrize(
    ("bits", "codes", "error"),
    [(8, [0, 64, 128, 191, 255], 1 / 255), (4, [0, 4, 8, 11, 15], 0.0667), (2, [0, 1, 2, 2, 3], 0.3333)],
)
def test_worked_codes_round_half_up(bits: int, codes: list[int], error: float) -> None:
    exact = grid.span(RAMP, bits, dim=-1)
    found = grid.to_codes(RAMP, exact, bits)
    assert found.dtype == torch.uint8
    assert found.tolist() == [codes]
    worst = (RAMP - back(RAMP, exact, bits)).abs().max()
    assert worst == pytest.approx(error, abs=1e-4)
    assert worst <= exact.scale / 2 * (1 + 1e-4)


def test_worked_eight_bit_values() -> None:
    found = back(RAMP, grid.span(RAMP, 8, dim=-1), 8)
    torch.testing.assert_close(found, torch.tensor([[-1.0, -0.4980, 0.0039, 0.4980, 1.0]]), atol=1e-4, rtol=0)


def test_span_is_the_step_and_the_minimum() -> None:
    exact = grid.span(RAMP, 8, dim=-1)
    assert exact.scale.item() == pytest.approx(2 / 255)
    assert exact.zero.item() == -1.0


def test_clip_shrinks_about_the_middle() -> None:
    clipped = grid.span(torch.tensor([[-1.0, 3.0]]), 2, dim=-1, clip=0.5)
    assert clipped.zero.item() == 0.0
    assert clipped.scale.item() == pytest.approx(2 / 3)


@BITS
@given(groups)
def test_error_is_at_most_half_a_stored_step(bits: int, x: list[list[float]]) -> None:
    x_NC = torch.tensor(x)
    kept = grid.stored(grid.span(x_NC, bits, dim=-1), bits)
    rounding = x_NC.abs().amax(-1, keepdim=True) * 2.0**-20 + 2.0**-120  # a step may vanish among the subnormals
    assert ((x_NC - back(x_NC, kept, bits)).abs() <= kept.scale.float() * (0.5 + 2.0**-14) + rounding).all()


@BITS
@given(groups)
def test_stored_step_is_hardly_wider_than_the_exact_one(bits: int, x: list[list[float]]) -> None:
    """bf16 costs 2^-7 of the step, and 2^-7 of the zero spread over the levels."""
    x_NC = torch.tensor(x)
    exact = grid.span(x_NC, bits, dim=-1)
    kept = grid.stored(exact, bits)
    allowed = (exact.scale + exact.zero.abs() * 2.0**-7 / grid.levels(bits)) * (1 + 2.0**-7) + 2.0**-120
    assert (kept.scale.float() <= allowed).all()


@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159, 1e-6, 65504.0, -4e9, 1e30])
def test_constant_group_comes_back(bits: int, value: float) -> None:
    x = torch.full((2, 8), value)
    kept = grid.stored(grid.span(x, bits, dim=-1), bits)
    torch.testing.assert_close(back(x, kept, bits), x, rtol=2.0**-14, atol=0)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127))
def test_rounded_up_is_the_next_bf16(value: float) -> None:
    x = torch.tensor([value])
    up = grid.rounded_up(x)
    below = torch.nextafter(up, torch.full_like(up, -math.inf))
    assert up.dtype == torch.bfloat16
    assert below.float() < x <= up.float()


def test_a_group_without_extent_divides_by_one() -> None:
    assert grid.divisor(torch.tensor([0.0, 0.25]).bfloat16()).tolist() == [1.0, 0.25]


def test_finite_mends_each_slot_alone() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, -2.0, inf], [nan, 5.0, -inf], [nan, inf, -inf], [1.0, 2.0, 3.0]])
    assert grid.finite(x).tolist() == [[1.0, -2.0, 2.0], [0.0, 5.0, -5.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]


def test_finite_clamps_what_would_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    x = grid.finite(torch.tensor([[largest, -largest, 1.0]]))
    kept = grid.stored(grid.span(x, 8, dim=-1), 8)
    assert back(x, kept, 8).isfinite().all()
