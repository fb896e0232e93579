"""The bases of a model's layers, measured once (`kvfold calibrate`).

    header     "heads": of a group
    tensors    "LAYER.SIDE.mean" fp32 [G, X], "LAYER.SIDE.axes" fp32 [G, X, X], "LAYER.SIDE.worth" fp32 [G, X]

The axes of a group are its columns, orthonormal, in the order in which they are worth keeping. The file is as large as
the bases of all ranks; what a rank keeps of them is worked out when it is used.

    G groups   X channels of a group (its heads, D each)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.codec.calibration import Calibration
from kvfold.core import LayerSpec, ModelSpec

_PARTS = ("mean", "axes", "worth")
_LEAST_SQUARE = 1e-3  # how far axes may be from orthonormal


@dataclass(frozen=True, eq=False)
class SideBasis:
    """One side of one layer, all ranks."""

    mean_GX: Tensor
    axes_GXX: Tensor
    worth_GX: Tensor  # what leaving an axis out is expected to cost, not rising


@dataclass(frozen=True, eq=False)
class Bases(Calibration):
    """Of one model, for each of its compressible layers."""

    KIND: ClassVar[str] = "bases"
    FORMAT: ClassVar[str] = "kvfold-bases-1"
    MAX_BYTES: ClassVar[int] = 1 << 30

    num_heads: int  # of a group
    layers: Mapping[int, Mapping[Side, SideBasis]]

    @property
    def said(self) -> dict[str, Any]:
        return {"heads": self.num_heads}

    @property
    def parts(self) -> dict[str, Tensor]:
        return {
            f"{index}.{side}.{name}": part
            for index, sides in self.layers.items()
            for side, basis in sides.items()
            for name, part in zip(_PARTS, vars(basis).values(), strict=True)
        }

    @classmethod
    def made(cls, facts: tuple[str, str, str], header: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Bases:
        return cls(*facts, int(header["heads"]), _layers(parts))

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
