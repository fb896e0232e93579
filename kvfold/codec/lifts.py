"""The lifts of a model's layers, measured once (`kvfold calibrate --for aqua`).

    tensors    "LAYER.SIDE.weight" fp32 [C, C], "LAYER.SIDE.bias" fp32 [C]

    C channels of a token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.codec.calibration import Calibration
from kvfold.core import ModelSpec


@dataclass(frozen=True, eq=False)
class SideLift:
    """One side of one layer."""

    weight_CC: Tensor
    bias_C: Tensor


@dataclass(frozen=True, eq=False)
class Lifts(Calibration):
    """Of one model, for every second of its layers, or where layers do not pair up (`lifted_layers`) for fewer."""

    KIND: ClassVar[str] = "lifts"
    FORMAT: ClassVar[str] = "kvfold-lifts-1"
    MAX_BYTES: ClassVar[int] = 4 << 30

    layers: Mapping[int, Mapping[Side, SideLift]]

    @property
    def parts(self) -> dict[str, Tensor]:
        sides = [(f"{i}.{side}", lift) for i, both in self.layers.items() for side, lift in both.items()]
        weights = {f"{name}.weight": lift.weight_CC for name, lift in sides}
        return weights | {f"{name}.bias": lift.bias_C for name, lift in sides}

    @classmethod
    def made(cls, facts: tuple[str, str, str], header: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Lifts:
        return cls(*facts, _layers(parts))

    def fits(self, spec: ModelSpec) -> bool:
        """Whether they were measured on these weights and have their shapes."""
        return (
            self.weights == spec.weights_digest
            and list(self.layers) == lifted_layers(spec)
            and all(lift.bias_C.numel() == _width(spec, i) for i, both in self.layers.items() for lift in both.values())
        )


def lifted_layers(spec: ModelSpec) -> list[int]:
    """Layers that are told from the one below, which is not: a read then needs two layers, not all."""
    found: list[int] = []
    for i in range(1, spec.num_layers):
        both = spec.layers[i - 1], spec.layers[i]
        alike = len({(layer.num_kv_heads, layer.head_dim) for layer in both}) == 1
        if i - 1 not in found and alike and all(layer.compressible for layer in both):
            found.append(i)
    return found


def _width(spec: ModelSpec, layer: int) -> int:
    return spec.layers[layer].num_kv_heads * spec.layers[layer].head_dim


def _layers(tensors: Mapping[str, Tensor]) -> dict[int, dict[Side, SideLift]]:
    """ValueError or LookupError where tensors are not those of lifts."""
    indices = sorted({int(name.partition(".")[0]) for name in tensors})
    return {i: {side: _side(tensors, f"{i}.{side}") for side in SIDES} for i in indices}


def _side(tensors: Mapping[str, Tensor], name: str) -> SideLift:
    weight_CC, bias_C = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    width = bias_C.numel()
    if bias_C.shape != (width,) or weight_CC.shape != (width, width):
        raise ValueError("shapes differ")
    if not (weight_CC.isfinite().all() and bias_C.isfinite().all()):
        raise ValueError("a number is none")
    return SideLift(weight_CC, bias_C)
