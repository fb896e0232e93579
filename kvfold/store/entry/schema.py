"""Schema check of a snapshot: names, dtypes and shapes its tensors may have for this model and policy.

Page tensors are also checked by `kvfold.pages.serialize`; this covers codec states, the open block, observer state and
the sequence's lengths as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codec.base import Side
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache

_SIDES: tuple[Side, Side] = ("k", "v")


class TensorRule(NamedTuple):
    """Allowed dtypes and shape; a dimension of None is any number from `least` on."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]
    least: int = 0

    def fits(self, tensor: Tensor) -> bool:
        sizes = zip(tensor.shape, self.shape, strict=False)
        same = all(found >= self.least if size is None else found == size for found, size in sizes)
        return tensor.dtype in self.dtypes and tensor.ndim == len(self.shape) and same


def check_schema(sequence: SequenceCache, tensors: Mapping[str, Tensor]) -> None:
    """InputError or KeyError for the first tensor that does not fit an empty sequence."""
    expected = {"pinned": TensorRule((torch.int64,), (None, 2)), "lens": TensorRule((torch.int64,), (2,))}
    expected["sentences"] = TensorRule((torch.int64,), (None,))
    for layer in range(sequence.spec.num_layers):
        stored_len = _stored_len(tensors[f"{layer}.lens"])
        expected |= {f"{layer}.{name}": rule for name, rule in _layer_rules(sequence, layer, stored_len).items()}
    for name, tensor in tensors.items():
        if name not in expected or not expected[name].fits(tensor):
            raise InputError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {expected.get(name)}")
    if len({tensor.shape[1] for name, tensor in tensors.items() if ".open." in name}) > 1:
        raise InputError("open blocks of different layers differ in length")
    _check_lens(tensors["lens"])


def _stored_len(lens: Tensor) -> int:
    """Slots of the longest head."""
    if lens.ndim != 2 or lens.dtype != torch.int64:
        raise InputError(f"lengths are {lens.dtype} {tuple(lens.shape)}")
    return int(lens.sum(0).max()) if lens.numel() else 0


def _check_lens(lens: Tensor) -> None:
    sealed_len, last_compressed_len = lens.tolist()
    if not 0 <= last_compressed_len <= sealed_len:
        raise InputError(f"{sealed_len} tokens are sealed, and the last compression was at {last_compressed_len}")


def _layer_rules(sequence: SequenceCache, layer: int, stored_len: int) -> dict[str, TensorRule]:
    """Rules of all tensors a layer may have."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    heads, queries, dim = spec.num_kv_heads, spec.num_query_heads, spec.head_dim
    floats, computed = (torch.float32,), (torch.float32, sequence.spec.dtype)
    rules = {
        "lens": TensorRule((torch.int64,), (None, heads)),
        "open.k": TensorRule((sequence.spec.kv_dtype,), (heads, None, dim)),
        "open.v": TensorRule((sequence.spec.kv_dtype,), (heads, None, dim)),
        "side.mass": TensorRule(floats, (heads, None), stored_len),
        "side.open_mass": TensorRule(floats, (heads, sequence.config.open_len)),
        "side.last_q": TensorRule(computed, (queries, None, dim)),
        "side.centre": TensorRule(floats, (queries, dim)),
        "side.sum": TensorRule(floats, (queries, dim)),
        "side.outer": TensorRule(floats, (queries, dim, dim)),
        "side.count": TensorRule((torch.int64,), (1,)),
        "side.query_end": TensorRule((torch.int64,), (1,)),
    }
    if sequence.fp_sinks is not None:
        exact = TensorRule((sequence.spec.kv_dtype,), (heads, None, dim))
        rules |= {"exact.k": exact, "exact.v": exact}
    if sequence.offloaded is not None and layer in sequence.offloaded.layers:
        slots, counts = (
            TensorRule((sequence.spec.kv_dtype,), (heads, None, dim)),
            TensorRule((torch.int32,), (heads, None)),
        )
        rules |= {"demoted.k": slots, "demoted.v": slots, "demoted.position": counts, "demoted.used": counts}
    rules |= {item.name: TensorRule((item.dtype,), (None, item.width)) for item in pages.fields}
    return rules | _state_rules(sequence, layer)


def _state_rules(sequence: SequenceCache, layer: int) -> dict[str, TensorRule]:
    """Rules of codec states, whose shapes do not depend on the slots they were fitted to."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    x_RSD = torch.zeros(spec.num_kv_heads, 1, spec.head_dim)
    valid_RS = torch.ones(x_RSD.shape[:2], dtype=torch.bool)
    found = {}
    for side in _SIDES:
        for name, tensor in pages.codec(side).init_state(side, x_RSD, valid_RS).items():
            found[f"state.{side}.{name}"] = TensorRule((tensor.dtype,), tuple(tensor.shape))
    return found
