"""The lifts of a model's layers, measured once (`kvfold calibrate --for aqua`), and the file they are kept in.

metadata   "kvfold": JSON with the format, the model, the digest of its weights, and how they were measured
tensors    "LAYER.SIDE.weight" fp32 [C, C], "LAYER.SIDE.bias" fp32 [C]

C channels of a token
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvfold.codec.base import SIDES, Side
from kvfold.core import ModelSpec
from kvfold.errors import FileError
from kvfold.whole import read_tensors, replacing

FORMAT = "kvfold-lifts-1"
MAX_BYTES = 4 << 30


@dataclass(frozen=True, eq=False)
class SideLift:
    """One side of one layer."""

    weight_CC: Tensor
    bias_C: Tensor


@dataclass(frozen=True, eq=False)
class Lifts:
    """Of one model, for every second of its layers, or where layers do not pair up (`lifted_layers`) for fewer."""

    model: str
    weights: str  # digest
    measured: str  # how, in words
    layers: Mapping[int, Mapping[Side, SideLift]]

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
        said = {"format": FORMAT, "model": self.model, "weights": self.weights, "measured": self.measured}
        return json.dumps(said, sort_keys=True)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        sides = [(f"{i}.{side}", lift) for i, both in self.layers.items() for side, lift in both.items()]
        parts = [(f"{name}.weight", lift.weight_CC) for name, lift in sides]
        parts += [(f"{name}.bias", lift.bias_C) for name, lift in sides]
        return {name: part.float().cpu().contiguous() for name, part in parts}

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            save_file(self._tensors, temporary, metadata={"kvfold": self._header})

    @classmethod
    def read(cls, path: Path) -> Lifts:
        """FileError if the file is not there, too large, or holds no lifts."""
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise FileError(f"{path} cannot be read ({error.strerror})") from None
        if num_bytes > MAX_BYTES:
            raise FileError(f"{path} has {num_bytes} bytes; lifts have at most {MAX_BYTES}")
        try:
            header, tensors = read_tensors(path, FORMAT)
            model, weights, measured = (str(header[name]) for name in ("model", "weights", "measured"))
            return cls(model, weights, measured, _layers(tensors))
        except (SafetensorError, LookupError, ValueError, TypeError, OSError) as error:
            raise FileError(f"{path} is truncated or holds no lifts") from error

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
