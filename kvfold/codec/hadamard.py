"""An orthonormal Hadamard rotation of the channels, block diagonal where the head dim is no power of two.

Rotating q and k alike leaves q.k as it is and spreads an outlier channel over all channels of its block, so that one
scale per slot suffices (QuaRot, arXiv:2404.00456). Sylvester's matrix divided by sqrt(block) is symmetric and its own
inverse, so the same function rotates both ways.

    N flat slots   D head dim   B block (largest power of two that divides D)
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def block_size(head_dim: int) -> int:
    """The largest power of two that divides the head dim: 64 -> 64, 80 -> 16, 96 -> 32."""
    return head_dim & -head_dim


def rotate(x_ND: Tensor) -> Tensor:
    """Rotate the last axis in fp32 by butterflies.

    Sums and differences of single elements only: the result of a slot is the same bits whatever slots are rotated with
    it, which a matrix product does not promise (BLAS takes other kernels for other N). Codes rest on this.
    """
    head_dim = x_ND.shape[-1]
    block = block_size(head_dim)
    y = x_ND.float()
    half = 1
    while half < block:
        # channels [.. a: half .. | .. b: half ..] of each 2*half wide stretch become [a + b | a - b]
        a, b = y.reshape(*x_ND.shape[:-1], head_dim // (2 * half), 2, half).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2)
        half *= 2
    return y.reshape(x_ND.shape) / math.sqrt(block)


@cache
def _block_matrix(block: int, device: torch.device) -> Tensor:
    return rotate(torch.eye(block, device=device))


def rotate_read(x: Tensor) -> Tensor:
    """The same rotation as one matrix product, for queries and slots that are read: no codes are made of them."""
    head_dim = x.shape[-1]
    block = block_size(head_dim)
    blocks = x.float().reshape(*x.shape[:-1], head_dim // block, block)
    return (blocks @ _block_matrix(block, x.device)).flatten(-2)


@cache
def signs(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotation of a whole head as a matrix of 1, -1 and 0, which every float holds exactly, for kernels that have
    matrix units; `factor` is still to be multiplied by."""
    return rotate(torch.eye(head_dim, device=device)).sign().to(dtype).contiguous()


def factor(head_dim: int) -> float:
    return 1 / math.sqrt(block_size(head_dim))
