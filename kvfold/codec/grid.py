"""The uniform grid all integer codecs share: x' = code * scale + zero, with code in 0 .. 2^bits - 1.

`zero` is the group's minimum as a float (asymmetric, as in KIVI, arXiv:2402.02750). Scale and zero are stored in bf16:
it has fp32's range, where fp16 overflows beyond 65504, and its short mantissa costs little (3 % at int4), as codes are
made against the *stored* numbers, rounded outwards (zero down, scale up) so that the grid still spans the group. So

    |x - x'| <= scale / 2      for clip = 1, up to fp32 rounding,

and a constant group comes back within 2^-14 of its value. `clip` < 1 shrinks the span about its
middle: on bell-shaped channels a finer step for the many is worth more than reach for the few.

    N flat slots   D head dim   a group is whatever `dim` runs over
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

META = torch.bfloat16
LARGEST = 1e30  # magnitudes beyond are clamped: sums over channels (rotation) and slots (mean) stay within fp32
HALF = 0.5 + 2.0**-15  # a tie stays a tie although the step that divides it was rounded to fp32


class Grid(NamedTuple):
    """Scale and zero of each group, shaped to broadcast against the group."""

    scale: Tensor
    zero: Tensor


def finite(x_ND: Tensor) -> Tensor:
    """fp32 slots without NaN (0 instead) and infinity (the slot's largest finite magnitude, with its sign).

    Works slot by slot, before anything mixes channels or slots: a broken slot harms itself alone.
    """
    x = x_ND.float()
    reach = x.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True).clamp(max=LARGEST)
    return torch.minimum(torch.maximum(x.nan_to_num(nan=0.0), -reach), reach)


def grouped(x_ND: Tensor, channels: int) -> Tensor:
    """A view [N, groups, channels]; also of no slots, where a -1 would be ambiguous."""
    return x_ND.view(x_ND.shape[0], x_ND.shape[1] // channels, channels)


def span(x: Tensor, bits: int, dim: int, clip: float = 1.0) -> Grid:
    """The fp32 grid from minimum to maximum along `dim` (kept as 1), shrunk to `clip` about the middle."""
    low, high = x.aminmax(dim=dim, keepdim=True)
    cut = (high - low) * ((1.0 - clip) / 2)
    return Grid(scale=divided(high - low - 2 * cut, levels(bits)), zero=low + cut)


def stored(grid: Grid, bits: int) -> Grid:
    """The grid as it is kept: bf16, zero rounded down and scale up, so that it spans what the fp32 grid spans."""
    zero = -rounded_up(-grid.zero)
    top = grid.zero + grid.scale * levels(bits)
    return Grid(scale=rounded_up(divided(top - zero.float(), levels(bits))), zero=zero)


def to_codes(x: Tensor, grid: Grid, bits: int) -> Tensor:
    """uint8 codes, one per element, rounded half up; a grid of scale 0 gives code 0."""
    steps = (x - grid.zero.float()) / divisor(grid.scale)
    return (steps + HALF).floor().clamp(0, levels(bits)).to(torch.uint8)


def levels(bits: int) -> int:
    """Steps of the grid, which is also its largest code."""
    return (1 << bits) - 1


def divisor(scale: Tensor) -> Tensor:
    """The scale in fp32, 1 where it is 0: a group without extent has all its codes at 0."""
    wide = scale.float()
    return torch.where(wide > 0, wide, 1.0)


def divided(x: Tensor, number: float) -> Tensor:
    """The nearest to x / number, on every device: a GPU takes the product with a rounded inverse for it, which is not,
    unless the number is a tensor."""
    return x / x.new_full((), number)


def rounded_up(x: Tensor) -> Tensor:
    """The smallest bf16 number that is not below x."""
    near = x.to(META)
    return torch.where(near.float() < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
