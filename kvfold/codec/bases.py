"""The bases of a model's layers, measured once (`kvfold calibrate`), and the file they are kept in.

    metadata   "kvfold": JSON with the format, the model, the digest of its weights, and how they were measured
    tensors    "LAYER.SIDE.mean" fp32 [G, X], "LAYER.SIDE.axes" fp32 [G, X, X], "LAYER.SIDE.worth" fp32 [G, X]

The axes of a group are its columns, orthonormal, in the order in which they are worth keeping. The file is as large as
the bases of all ranks; what a rank keeps of them is worked out when it is used.

    G groups   X channels of a group (its heads, D each)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.core import LayerSpec, ModelSpec
from kvfold.errors import FileError
from kvfold.whole import read_tensors, replacing

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
        said = {"model": self.model, "weights": self.weights, "measured": self.measured, "heads": self.num_heads}
        return json.dumps({"format": FORMAT, **said}, sort_keys=True)

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
        """FileError if the file is not there, too large, or holds no bases."""
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
        width = self.num_heads * spec.head_dim
        shape = (spec.num_kv_heads // self.num_heads, width)
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
