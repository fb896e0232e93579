"""The way into latents and back, by hand and over shapes.

N flat slots   n slots of a head   D head dim   X channels of a group   r latents of a group
"""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.codec.basis import Basis, mixing
from kvfold.core import Rope
from kvfold.errors import InputError

HALF = math.sqrt(0.5)


def by_hand(rope: Rope | None = None) -> Basis:
    """Two heads of two channels, two latents: the first channels of both together, and the second ones."""
    axes_Xr = torch.tensor([[HALF, 0.0], [0.0, HALF], [HALF, 0.0], [0.0, HALF]])
    return Basis(2, torch.tensor([[1.0, 0.0, 1.0, 0.0]]), axes_Xr.unsqueeze(0), rope)


def drawn(num_groups: int, num_heads: int, head_dim: int, rank: int) -> Basis:
    generator = torch.Generator().manual_seed(rank)
    width = num_heads * head_dim
    axes_GXX = torch.linalg.qr(torch.randn(num_groups, width, width, generator=generator)).Q
    mean_GX = torch.randn(num_groups, width, generator=generator)
    half = head_dim // 2
    return Basis(num_heads, mean_GX, axes_GXX[..., :rank], Rope(tuple(100.0 ** (-i / half) for i in range(half))))


def there_and_back(basis: Basis, x_ND: torch.Tensor, position_N: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Every slot rebuilt from the latents of its group."""
    shares = basis.latents(x_ND, position_N, counts).split(counts)
    found = []
    for head in range(len(counts)):
        first = head - head % basis.num_heads
        found.append(basis.slots(head, torch.cat(shares[first : first + basis.num_heads], -1)))
    return basis.rotated(torch.cat(found), position_N)


def test_numbers_by_hand() -> None:
    """One slot, (3, 5) in head 0 and (7, 1) in head 1: less the mean (2, 5) and (6, 1)."""
    basis = by_hand()
    latents = basis.latents(torch.tensor([[3.0, 5.0], [7.0, 1.0]]), torch.tensor([0, 0]), [1, 1])
    torch.testing.assert_close(latents, torch.tensor([[8 * HALF], [6 * HALF]]))  # each head's page holds one
    assert basis.width == 1
    whole = latents.view(1, 2)
    torch.testing.assert_close(basis.slots(0, whole), torch.tensor([[5.0, 3.0]]))
    torch.testing.assert_close(basis.slots(1, whole), torch.tensor([[5.0, 3.0]]))


def test_keys_are_turned_back_first() -> None:
    """A quarter turn per position: (3, 5) at position 1 was (5, -3) at 0."""
    basis, quarter = by_hand(Rope((math.pi / 2,))), torch.tensor([1, 1])
    latents = basis.latents(torch.tensor([[3.0, 5.0], [3.0, 5.0]]), quarter, [1, 1])
    torch.testing.assert_close(latents, torch.tensor([[8 * HALF], [-6 * HALF]]))
    back = basis.rotated(basis.slots(0, latents.view(1, 2)), quarter[:1])
    torch.testing.assert_close(back, torch.tensor([[3.0, 5.0]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("end", [1, 7, 500, 1200])
def test_looked_up_turns_are_those_that_are_computed(end: int) -> None:
    """Where no slot lies, positions are what stands in the memory."""
    basis, position_N = drawn(1, 2, 16, 32), torch.arange(end, dtype=torch.int32).flip(0)
    x_ND = torch.randn(end + 2, 16)
    noise = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    looked_up = basis.rotated(x_ND, torch.cat((position_N, noise)), end)
    assert torch.equal(looked_up[:end], basis.rotated(x_ND[:end], position_N))


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [4, 16, 64])
def test_all_axes_give_slots_back(num_heads: int, head_dim: int) -> None:
    basis = drawn(2, num_heads, head_dim, num_heads * head_dim)
    counts = [7] * (2 * num_heads)
    x_ND, position_N = torch.randn(sum(counts), head_dim), torch.arange(7).repeat(len(counts)) * 500
    torch.testing.assert_close(there_and_back(basis, x_ND, position_N, counts), x_ND, atol=1e-4, rtol=0)


def test_some_axes_give_the_nearest_point() -> None:
    """What is lost is at right angles to what is kept."""
    basis, counts = drawn(1, 2, 16, 20), [9, 9]
    x_ND, position_N = torch.randn(18, 16), torch.arange(9).repeat(2)
    lost = basis.rotated(there_and_back(basis, x_ND, position_N, counts) - x_ND, -position_N)
    lost_nX = torch.cat(lost.split(counts), -1)
    assert float(lost_nX.norm()) > 0.1
    assert float((lost_nX @ basis.axes_GXr[0]).abs().max()) < 1e-4


def test_single_heads_may_differ_in_length() -> None:
    basis, counts = drawn(3, 1, 16, 16), [5, 0, 11]
    x_ND, position_N = torch.randn(16, 16), torch.arange(16)
    torch.testing.assert_close(there_and_back(basis, x_ND, position_N, counts), x_ND, atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="heads that are stored together have different slots"):
        drawn(1, 3, 16, 48).latents(x_ND, position_N, counts)


def test_latents_do_not_depend_on_the_slots_beside() -> None:
    basis = drawn(1, 1, 64, 44)
    x_ND, position_N = torch.randn(300, 64), torch.arange(300)
    whole = basis.latents(x_ND, position_N, [300])
    for first, count in ((0, 1), (7, 13), (100, 200)):
        part = slice(first, first + count)
        assert basis.latents(x_ND[part], position_N[part], [count]).equal(whole[part])


def test_a_broken_slot_harms_itself_alone() -> None:
    basis, x_ND, position_N = drawn(1, 1, 16, 12), torch.randn(5, 16), torch.arange(5)
    clean = basis.latents(x_ND, position_N, [5])
    x_ND[2, 3] = torch.nan
    found = basis.latents(x_ND, position_N, [5])
    assert found.isfinite().all() and found[[0, 1, 3, 4]].equal(clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("size", [1, 2, 12, 64, 132])
def test_mixing_is_orthonormal_and_even(size: int) -> None:
    matrix = mixing(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-10, rtol=0)
    assert float(matrix.abs().max()) <= math.sqrt(2 / size) + 1e-12


def test_mixing_two_is_hadamard() -> None:
    torch.testing.assert_close(mixing(2), torch.tensor([[HALF, HALF], [HALF, -HALF]], dtype=torch.float64))
