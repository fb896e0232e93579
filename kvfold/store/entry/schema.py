"""Whether the tensors of a snapshot are those a sequence of this model and policy can have, names, dtypes and shapes.

What goes into pages is checked by `kvfold.pages.serialize` as well; here is also what codecs learnt, the open block,
what scorers observed, and the lengths of the sequence.
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


class Form(NamedTuple):
    """None: any number from `least` on."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]
    least: int = 0

    def fits(self, tensor: Tensor) -> bool:
        sizes = zip(tensor.shape, self.shape, strict=False)
        same = all(found >= self.least if size is None else found == size for found, size in sizes)
        return tensor.dtype in self.dtypes and tensor.ndim == len(self.shape) and same


def check_fit(sequence: SequenceCache, tensors: Mapping[str, Tensor]) -> None:
    """InputError or KeyError for the first tensor that an empty sequence cannot take."""
    expected = {"pinned": Form((torch.int64,), (None, 2)), "lens": Form((torch.int64,), (2,))}
    expected["sentences"] = Form((torch.int64,), (None,))
    for layer in range(sequence.spec.num_layers):
        stored_len = _stored_len(tensors[f"{layer}.lens"])
        expected |= {f"{layer}.{name}": form for name, form in _layer_forms(sequence, layer, stored_len).items()}
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


def _layer_forms(sequence: SequenceCache, layer: int, stored_len: int) -> dict[str, Form]:
    """Of everything a layer may have."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    heads, queries, dim = spec.num_kv_heads, spec.num_query_heads, spec.head_dim
    floats, computed = (torch.float32,), (torch.float32, sequence.spec.dtype)
    forms = {
        "lens": Form((torch.int64,), (None, heads)),
        "open.k": Form((sequence.spec.kv_dtype,), (heads, None, dim)),
        "open.v": Form((sequence.spec.kv_dtype,), (heads, None, dim)),
        "side.mass": Form(floats, (heads, None), stored_len),
        "side.open_mass": Form(floats, (heads, sequence.config.open_len)),
        "side.last_q": Form(computed, (queries, None, dim)),
        "side.centre": Form(floats, (queries, dim)),
        "side.sum": Form(floats, (queries, dim)),
        "side.outer": Form(floats, (queries, dim, dim)),
        "side.count": Form((torch.int64,), (1,)),
        "side.query_end": Form((torch.int64,), (1,)),
    }
    if sequence.fp_sinks is not None:
        exact = Form((sequence.spec.kv_dtype,), (heads, None, dim))
        forms |= {"exact.k": exact, "exact.v": exact}
    if sequence.offloaded is not None and layer in sequence.offloaded.layers:
        slots, counts = Form((sequence.spec.kv_dtype,), (heads, None, dim)), Form((torch.int32,), (heads, None))
        forms |= {"demoted.k": slots, "demoted.v": slots, "demoted.position": counts, "demoted.used": counts}
    forms |= {item.name: Form((item.dtype,), (None, item.width)) for item in pages.fields}
    return forms | _state_forms(sequence, layer)


def _state_forms(sequence: SequenceCache, layer: int) -> dict[str, Form]:
    """What the codecs of a layer learn from any slots has the same form."""
    spec, pages = sequence.spec.layers[layer], sequence.tail.layers[layer].page_class
    x_RSD = torch.zeros(spec.num_kv_heads, 1, spec.head_dim)
    valid_RS = torch.ones(x_RSD.shape[:2], dtype=torch.bool)
    found = {}
    for side in _SIDES:
        for name, tensor in pages.codec(side).prepare(side, x_RSD, valid_RS).items():
            found[f"state.{side}.{name}"] = Form((tensor.dtype,), tuple(tensor.shape))
    return found
