"""The rotation: orthonormal, its own inverse, the same bits for a slot in any company."""

from __future__ import annotations

import pytest
import torch

from kvfold.codec import hadamard

DIMS = pytest.mark.parametrize("head_dim", [1, 7, 48, 64, 80, 96, 128, 256])


@pytest.mark.parametrize(("head_dim", "block"), [(48, 16), (64, 64), (80, 16), (96, 32), (256, 256)])
def test_block_is_the_largest_power_of_two_that_divides(head_dim: int, block: int) -> None:
    assert hadamard.block_size(head_dim) == block


@DIMS
def test_rotation_is_orthonormal_and_its_own_inverse(head_dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, head_dim)
    torch.testing.assert_close(hadamard.rotate(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(hadamard.rotate(hadamard.rotate(x)), x)


def test_an_outlier_spreads_evenly() -> None:
    assert hadamard.rotate(torch.tensor([[0.0, 8.0, 0.0, 0.0]])).tolist() == [[4.0, -4.0, 4.0, -4.0]]


@DIMS
def test_query_path_is_the_same_rotation(head_dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, head_dim)
    torch.testing.assert_close(hadamard.rotate_read(q), hadamard.rotate(q))


def test_a_slot_rotates_to_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    x = torch.randn(257, 128)
    whole = hadamard.rotate(x)
    assert all(hadamard.rotate(x[i : i + 1]).equal(whole[i : i + 1]) for i in range(257))
