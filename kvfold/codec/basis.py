"""Low-rank bases: keys and values projected to latents and back (Palu, arXiv:2407.21118).

Palu takes a projection W apart, whitened by its inputs: with S S^T = E[x x^T] over texts, the best rank-r part of W S
is U U^T W S for the first r left singular vectors U. These are the eigenvectors of W E[x x^T] W^T, the covariance of
what W puts out, so a latent is U^T k of a key as it is cached, rotated back to position 0, and no weight has to be
touched. U is orthonormal and stays so when a matrix mixes the latents: only what is left out is lost.

Heads of a group have their latents in common; each head's page holds its share of them, so the heads of a group must
hold the same slots, and one head is read together with the others.

    G groups   s heads of a group   D head dim   X channels of a group, s D   r latents of a group   w in a head's page
    N flat slots, head after head   n slots of a head
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.codec import grid
from kvfold.codec.base import Codec, Side
from kvfold.core import ModelSpec, Rope
from kvfold.errors import InputError


@dataclass(frozen=True, eq=False)
class Basis:
    """Of one side of one layer, on one device: slot = mean + axes @ latents, and keys are then rotated by `rope`."""

    num_heads: int  # s
    mean_GX: Tensor
    axes_GXr: Tensor
    rope: Rope | None = None

    @property
    def width(self) -> int:
        """Latents that each head's page holds of a slot."""
        return self.axes_GXr.shape[2] // self.num_heads

    def latents(self, x_ND: Tensor, position_N: Tensor, counts: Sequence[int]) -> Tensor:
        """fp32 [N, w] of slots with counts per head; heads of a group have the same slots.

        Summed in float64, so that a slot's latents do not depend on the slots beside it.
        """
        x_ND = grid.finite(x_ND)
        if self.rope is not None:
            x_ND = self.rope.rotate(x_ND, -position_N)
        heads, found = x_ND.double().split(list(counts)), []
        for group, (mean_X, axes_Xr) in enumerate(zip(self.mean_GX.double(), self.axes_GXr.double(), strict=True)):
            mine = heads[group * self.num_heads : (group + 1) * self.num_heads]
            if len({len(x_nD) for x_nD in mine}) > 1:
                raise InputError("heads that are stored together have different slots; use a basis of single heads")
            latent_nr = (torch.cat(mine, -1) - mean_X) @ axes_Xr
            found += latent_nr.float().split(self.width, -1)
        return torch.cat(found)

    def slots(self, head: int, latent_nr: Tensor) -> Tensor:
        """fp32 [n, D] of one head from the latents of its group; keys at position 0."""
        group, place = divmod(head, self.num_heads)
        dim = self.mean_GX.shape[1] // self.num_heads
        mine = slice(place * dim, (place + 1) * dim)
        return torch.addmm(self.mean_GX[group, mine], latent_nr.float(), self.axes_GXr[group, mine].mT)

    def rotated(self, x_ND: Tensor, position_N: Tensor, end: int | None = None) -> Tensor:
        """Slots at their positions; `end` as Rope.cos_sin takes it."""
        return x_ND if self.rope is None else self.rope.apply(x_ND, *self.rope.cos_sin(position_N, end))


def mixing(size: int) -> Tensor:
    """float64 [size, size], orthonormal and its own inverse, entries of about one magnitude: Hartley's matrix.

    The paper fuses a Hadamard matrix into the axes, so that latents, which fall off steeply, share one scale. Those
    exist for few sizes and three heads never have one; cos + sin of the same angles serves any.
    """
    index = torch.arange(size, dtype=torch.float64)
    angle = torch.outer(index, index).remainder(size) * (2 * math.pi / size)
    return (angle.cos() + angle.sin()) / math.sqrt(size)


class LowRankCodec(Codec):
    """Stores latents: pages project slots onto a basis of the model, and the codec encodes the projections."""

    needs_basis: ClassVar[bool] = True

    @property
    @abstractmethod
    def heads_together(self) -> int:
        """Heads that share their latents, so that they have to hold the same slots."""

    @abstractmethod
    def basis(self, side: Side, spec: ModelSpec, layer: int, device: torch.device) -> Basis:
        """The basis of one side of a layer, shared by all sequences."""
