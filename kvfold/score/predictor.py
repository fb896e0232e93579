"""Predictors of scores: a small MLP per KV head over stored keys and values, and its safetensors file.

Keys and values of a slot tell much of what a second reading of the prompt would find (KVzap, arXiv:2601.07891, predicts
it from hidden states, Locret, arXiv:2410.01805, from queries, keys and values). Here the key before RoPE and the value
are enough, so stored slots can be scored at any time, also while decoding.

    metadata   "kvfold": JSON with the format and the digest of the weights that the networks were trained on
    tensors    "LAYER.mean" fp32 [H, F], "LAYER.inner" fp16 [H, F, E], "LAYER.bias" [H, E], "LAYER.outer" [H, E + 1];
               in the smaller format "LAYER.inner" is int8, to be multiplied by "LAYER.scale" fp32 [H, F, 1]

    H KV heads   R rows   S slots   D head dim   F features = 2 D   E hidden units
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from kvfold.atomic_io import read_tensors, replacing
from kvfold.core import LayerSpec, ModelSpec, Rope
from kvfold.errors import FileError, PolicyError

FORMAT = "kvfold-scorer-1"
INT8_FORMAT = "kvfold-scorer-int8-1"  # of the files that come with the package
MAX_BYTES = 256 << 20
_PARTS = ("mean", "inner", "bias", "outer")
_MAX_ENTRIES = 2**24  # features in fp32 at a time


@dataclass(frozen=True)
class LayerPredictor:
    """log-odds = w.gelu(A^T (x - mean) + b) + c with x = (key before RoPE, value), for every KV head its own."""

    mean_HF: Tensor
    inner_HFE: Tensor  # A
    bias_HE: Tensor  # b
    outer_HE: Tensor  # w, then c

    def __call__(self, x_HSF: Tensor) -> Tensor:
        """fp32 [H, S] of fp32 features."""
        centred_HSF = x_HSF - self.mean_HF.unsqueeze(1)
        hidden_HSE = functional.gelu(centred_HSF @ self.inner_HFE.float() + self.bias_HE.unsqueeze(1))
        return (hidden_HSE @ self.outer_HE[:, :-1, None]).squeeze(-1) + self.outer_HE[:, -1:]

    def rows(self, k_RSD: Tensor, v_RSD: Tensor, position_RS: Tensor, rope: Rope | None) -> Tensor:
        """fp32 [R, S] for rows of several sequences, some slots at a time."""
        num_heads, num_slots = len(self.mean_HF), k_RSD.shape[1]
        step = max(1, _MAX_ENTRIES // (len(k_RSD) * self.mean_HF.shape[1]))
        found = []
        for tile in (slice(begin, begin + step) for begin in range(0, num_slots, step)):
            x_RSF = features(k_RSD[:, tile], v_RSD[:, tile], position_RS[:, tile], rope)
            found.append(torch.cat([self(x_HSF) for x_HSF in x_RSF.split(num_heads)]))
        return torch.cat(found, 1)

    def to(self, device: torch.device) -> LayerPredictor:
        return LayerPredictor(*(part.to(device) for part in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Predictor:
    """What was trained on one model: a predictor for each of its compressible layers."""

    weights: str  # digest of the model's
    layers: Mapping[int, LayerPredictor]

    def at(self, layer: int, device: torch.device) -> LayerPredictor:
        return _on_device(self, layer, device)


def features(k_RSD: Tensor, v_RSD: Tensor, position_RS: Tensor, rope: Rope | None) -> Tensor:
    """fp32 [R, S, F]: keys rotated back to position 0, then values."""
    k_RSD = k_RSD.float()
    if rope is not None:
        k_RSD = rope.rotate(k_RSD, -position_RS)
    return torch.cat((k_RSD, v_RSD.float()), -1)


def predictor_for(spec: ModelSpec, file: str) -> Predictor:
    """The predictor in a file, or, for "", the one that comes with the package for this model's weights."""
    if not file:
        return _shipped(spec.weights_digest, spec.name)
    path = Path(file)
    try:
        stat = path.stat()
    except OSError as error:
        raise FileError(
            f"the scorer {file} cannot be read ({error.strerror}); train one with kvfold train-scorer"
        ) from None
    found = _read(path, stat.st_size, (stat.st_ino, stat.st_mtime_ns))
    if found.weights != spec.weights_digest:
        raise FileError(
            f"the scorer {file} was trained on other weights than those of {spec.name}; train one on these with "
            "kvfold train-scorer"
        )
    indices = set(spec.compressible_layers)
    if set(found.layers) != indices or not all(_fits(found.layers[i], spec.layers[i]) for i in indices):
        raise FileError(f"{file} does not fit the layers of {spec.name}; train it again with kvfold train-scorer")
    return found


def save_predictor(predictor: Predictor, path: Path, *, int8: bool = False) -> None:
    """Write a file for `learned(file=…)`; with `int8`, in half the bytes, for the package."""
    tensors: dict[str, Tensor] = {}
    for index, layer in predictor.layers.items():
        parts = dict(zip(_PARTS, (part.float().cpu() for part in vars(layer).values()), strict=True))
        if int8:
            parts |= _int8(parts["inner"])
        else:
            parts["inner"] = parts["inner"].half()
        tensors |= {f"{index}.{name}": part.contiguous() for name, part in parts.items()}
    header = json.dumps({"format": INT8_FORMAT if int8 else FORMAT, "weights": predictor.weights}, sort_keys=True)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"kvfold": header})


def _int8(inner_HFE: Tensor) -> dict[str, Tensor]:
    """Codes with one scale for each feature: features differ by orders of magnitude, and their weights with them."""
    scale_HF1 = inner_HFE.abs().amax(-1, keepdim=True) / 127
    code_HFE = (inner_HFE / scale_HF1.where(scale_HF1 > 0, 1.0)).round().to(torch.int8)
    return {"inner": code_HFE, "scale": scale_HF1}


def shipped_path(weights: str) -> Path:
    """Where the package keeps the predictor for these weights, if it has one."""
    return Path(str(files("kvfold"))) / "data" / f"scorer-{weights[:16]}.safetensors"


@cache
def _shipped(weights: str, name: str) -> Predictor:
    path = shipped_path(weights)
    if not weights or not path.is_file():
        raise PolicyError(
            f"learned has no predictor for the weights of {name}; train one with kvfold train-scorer --model {name} "
            '--out FILE and write learned(file="FILE")'
        )
    return _read(path, path.stat().st_size, ())


@lru_cache(maxsize=8)
def _read(path: Path, num_bytes: int, version: tuple[int, ...]) -> Predictor:
    """What a file says; `version` tells apart what bore the same name."""
    if num_bytes > MAX_BYTES:
        raise FileError(f"{path} has {num_bytes} bytes; a scorer has at most {MAX_BYTES}")
    try:
        header, tensors = read_tensors(path, FORMAT, INT8_FORMAT)
        indices = sorted({int(name.partition(".")[0]) for name in tensors})
        if header["format"] == INT8_FORMAT:
            tensors |= {f"{i}.inner": tensors[f"{i}.inner"].float() * tensors[f"{i}.scale"] for i in indices}
        layers = {i: LayerPredictor(*(tensors[f"{i}.{part}"] for part in _PARTS)) for i in indices}
        return Predictor(str(header["weights"]), layers)
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise FileError(f"{path} is truncated or no scorer; train it again with kvfold train-scorer") from error


def _fits(layer: LayerPredictor, spec: LayerSpec) -> bool:
    num_heads, num_features = spec.num_kv_heads, 2 * spec.head_dim
    num_hidden = layer.bias_HE.shape[-1]
    shapes = ((num_heads, num_features), (num_heads, num_features, num_hidden), (num_heads, num_hidden))
    wanted = (*shapes, (num_heads, num_hidden + 1))
    parts = tuple(vars(layer).values())
    return tuple(tuple(part.shape) for part in parts) == wanted and all(part.isfinite().all() for part in parts)


@lru_cache(maxsize=512)
def _on_device(predictor: Predictor, layer: int, device: torch.device) -> LayerPredictor:
    """Copied once: layers are asked for again at every round of eviction."""
    return predictor.layers[layer].to(device)
