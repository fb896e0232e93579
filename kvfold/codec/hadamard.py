"""An orthonormal Hadamard rotation of the channels, and codecs that store keys as Hadamard(k - mean).

Rotating q and k alike leaves q.k as it is and spreads an outlier channel over all channels of its block, so that one
scale per slot suffices (QuaRot, arXiv:2404.00456). Sylvester's matrix divided by sqrt(block) is symmetric and its own
inverse, so the same function rotates both ways; it is block diagonal where the head dim is no power of two.

The mean key of a row takes away the channels that are large for every token, so that codes per slot, which can be
appended and moved, come close to those per channel, which cannot. Scores stay whole: q.k = rotate(q).stored + q.mean.
Values are stored as they are: a rotation would have to be undone at every read.

    R rows   S slots   N flat slots   D head dim   X queries   B block (largest power of two that divides D)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvfold.codec import grid
from kvfold.codec.base import Codec, Side, Slots, State


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


@dataclass(frozen=True)
class CentredCodec(Codec):
    """Common part; how slots are coded in that basis is left to others."""

    def has_state(self, side: Side) -> bool:
        return side == "k"

    def init_state(self, side: Side, x_RSD: Tensor, valid_RS: Tensor) -> State:
        """Keys: the mean of each row's valid slots, fp32 [R, D] (0 for a row without slots)."""
        if side == "v":
            return {}
        x = grid.finite(x_RSD) * valid_RS.unsqueeze(-1)
        return {"mean": x.sum(1) / valid_RS.sum(1).clamp(min=1).unsqueeze(-1)}

    def centred(self, side: Side, slots: Slots, state: State) -> Tensor:
        """What `encode` codes: finite slots [N, D] in fp32, keys in the stored basis."""
        x_ND = grid.finite(slots.x_ND)
        return rotate(x_ND - state["mean"][slots.row_N]) if side == "k" else x_ND

    def restore(self, side: Side, x_ND: Tensor, state: State, row_N: Tensor) -> Tensor:
        if side == "v":
            return x_ND
        return (rotate(x_ND) + state["mean"][row_N]).to(x_ND.dtype)

    def query(self, q_RXD: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        offset_RX = (q_RXD.float() @ state["mean"].unsqueeze(-1)).squeeze(-1)
        return rotate_read(q_RXD).to(q_RXD.dtype), offset_RX
