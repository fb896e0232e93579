"""Low-rank bases: keys and values projected to latents and back (Palu, arXiv:2407.21118), and their file.

Palu takes a projection W apart, whitened by its inputs: with S S^T = E[x x^T] over texts, the best rank-r part of W S
is U U^T W S for the first r left singular vectors U. These are the eigenvectors of W E[x x^T] W^T, the covariance of
what W puts out, so a latent is U^T k of a key as it is cached, rotated back to position 0, and no weight has to be
touched. U is orthonormal and stays so when a matrix mixes the latents: only what is left out is lost.

Heads of a group have their latents in common; each head's page holds its share of them, so the heads of a group must
hold the same slots, and one head is read together with the others.

A file (`kvfold calibrate`) holds the bases of all ranks; what a rank keeps of them is worked out when it is used. The
axes of a group are its columns, orthonormal, in the order in which they are worth keeping.

    metadata   "kvfold": JSON with the format, the model, the digest of its weights, how it was measured, and "heads" of
               a group
    tensors    "LAYER.SIDE.mean" fp32 [G, X], "LAYER.SIDE.axes" fp32 [G, X, X], "LAYER.SIDE.worth" fp32 [G, X]

    G groups   s heads of a group   D head dim   X channels of a group, s D   r latents of a group   w in a head's page
    N flat slots, head after head   n slots of a head
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvfold.atomic_io import read_tensors, replacing
from kvfold.codec import grid
from kvfold.codec.base import SIDES, Codec, Side
from kvfold.core import LayerSpec, ModelSpec, Rope
from kvfold.errors import FileError, InputError


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


FORMAT = "kvfold-bases-1"
MAX_BYTES = 1 << 30
_PARTS = ("mean", "axes", "worth")
_LEAST_SQUARE = 1e-3  # how far axes may be from orthonormal


@dataclass(frozen=True, eq=False)
class SideBasis:
    """One side of one layer, all ranks."""

    mean_GX: Tensor
    axes_GXX: Tensor
    worth_GX: Tensor  # what leaving an axis out is expected to cost, not rising


@dataclass(frozen=True, eq=False)
class Bases:
    """Of one model, for each of its compressible layers."""

    model: str
    weights: str  # digest
    measured: str  # how, in words
    num_heads: int  # of a group
    layers: Mapping[int, Mapping[Side, SideBasis]]

    @cached_property
    def digest(self) -> str:
        """sha256 of what the file says, wherever it lies."""
        found = hashlib.sha256(self._header.encode())
        for name, tensor in sorted(self._tensors.items()):
            found.update(name.encode())
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    @property
    def _header(self) -> str:
        facts = {"format": FORMAT, "model": self.model, "weights": self.weights, "measured": self.measured}
        return json.dumps({**facts, "heads": self.num_heads}, sort_keys=True)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{index}.{side}.{name}": part.float().cpu().contiguous()
            for index, sides in self.layers.items()
            for side, basis in sides.items()
            for name, part in zip(_PARTS, vars(basis).values(), strict=True)
        }

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            save_file(self._tensors, temporary, metadata={"kvfold": self._header})

    @classmethod
    def read(cls, path: Path) -> Bases:
        """FileError if the file is not there, too large, or of another kind."""
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise FileError(f"{path} cannot be read ({error.strerror})") from None
        if num_bytes > MAX_BYTES:
            raise FileError(f"{path} has {num_bytes} bytes; bases have at most {MAX_BYTES}")
        try:
            header, tensors = read_tensors(path, FORMAT)
            model, weights, measured = (str(header[name]) for name in ("model", "weights", "measured"))
            return cls(model, weights, measured, int(header["heads"]), _layers(tensors))
        except (SafetensorError, LookupError, ValueError, TypeError, OSError) as error:
            raise FileError(f"{path} is truncated or holds no bases") from error

    def fits(self, spec: ModelSpec) -> bool:
        """Whether they were measured on these weights and have their shapes."""
        return (
            self.weights == spec.weights_digest
            and set(self.layers) == set(spec.compressible_layers)
            and all(self._fits(sides, spec.layers[index]) for index, sides in self.layers.items())
        )

    def _fits(self, sides: Mapping[Side, SideBasis], spec: LayerSpec) -> bool:
        shape = (spec.num_kv_heads // self.num_heads, self.num_heads * spec.head_dim)
        return spec.num_kv_heads % self.num_heads == 0 and all(basis.mean_GX.shape == shape for basis in sides.values())


def _layers(tensors: Mapping[str, Tensor]) -> dict[int, dict[Side, SideBasis]]:
    """ValueError or LookupError where tensors are not those of bases."""
    indices = sorted({int(name.partition(".")[0]) for name in tensors})
    found: dict[int, dict[Side, SideBasis]] = {}
    for i in indices:
        found[i] = {side: SideBasis(*(tensors[f"{i}.{side}.{part}"] for part in _PARTS)) for side in SIDES}
        for basis in found[i].values():
            _check(basis)
    return found


def _check(basis: SideBasis) -> None:
    groups, width = basis.mean_GX.shape
    shapes = basis.axes_GXX.shape == (groups, width, width) and basis.worth_GX.shape == (groups, width)
    if not shapes or not all(part.isfinite().all() for part in vars(basis).values()):
        raise ValueError("shapes differ, or a number is none")
    square = basis.axes_GXX.mT @ basis.axes_GXX
    if float((square - torch.eye(width)).abs().max()) > _LEAST_SQUARE:
        raise ValueError("axes are not orthonormal")
