"""CacheGen's KV bitstream (arXiv:2310.07240): anchors, deltas in bins that grow with depth, entropy coding.

Every channel has two distributions, for anchors and for deltas, chosen among fixed Gaussian tables.

Differences from the reference: a channel has a mean and a weight of its anchor, since values of neighbouring tokens can
be almost independent; groups are longer; distributions are fixed tables, not profiles of a model.

    T tokens   L lanes: the channels of all fields, one field after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.errors import InputError
from kvfold.store.entry.encodings.base import Encoding, TensorSpec, TensorSpecs, check_specs
from kvfold.store.entry.encodings.deltas import GROUP, Floats, Quantised, dequantise, num_anchors, quantise
from kvfold.store.entry.encodings.gaussian_tables import ZERO, cheapest_table, gaussian_tables
from kvfold.store.entry.encodings.rans import Coded, InvalidStream, TableChoice, decode, encode
from kvfold.store.entry.format import Fields, InvalidEntry

_BIN_SHARES = (0.3, 0.6, 0.9)  # of a head's mean difference, by thirds of the layers

Stream = dict[str, NDArray[Any]]


class CacheGen(Encoding):
    """Lossy: about a fifth of the bytes of bf16."""

    name = "cachegen"
    is_exact = False

    def pack(self, fields: Fields, depth: float) -> Fields:
        share = _BIN_SHARES[int(len(_BIN_SHARES) * depth)]
        found = {name: quantise(_floats(x_HTD), share) for name, x_HTD in fields.items()}
        symbol_TL = (np.concatenate([part.symbol_TC for part in found.values()], 1) ^ -ZERO).view(np.uint8)
        row_T = _rows(len(symbol_TL))
        table_2L = np.stack([cheapest_table(symbol_TL[row_T == row]) for row in (0, 1)])
        coded = encode(symbol_TL, TableChoice(table_2L, row_T), gaussian_tables())
        packed = {"table": table_2L, "state": coded.states_L, "word": coded.words}
        for name, part in found.items():
            side = {"scale": part.scale_A, "bin": part.bin_H, "mean": part.mean_C, "weight": part.weight_C}
            packed |= {f"{name}.{key}": x for key, x in side.items()}
        return {name: torch.from_numpy(x) for name, x in packed.items()}

    def unpack(self, packed: Sequence[Fields], specs: TensorSpecs) -> list[Fields]:
        for one in packed:
            check_specs(one, _stream_specs(specs, one))
        streams = [{name: x.numpy() for name, x in one.items()} for one in packed]
        symbols = np.split(_symbols(streams, _num_tokens(specs)), len(streams), axis=1)
        return [_tensors(stream, symbol_TL, specs) for stream, symbol_TL in zip(streams, symbols, strict=True)]


def _floats(x_HTD: Tensor) -> Floats:
    if not x_HTD.isfinite().all():
        raise InputError("keys or values are not finite, which the form cachegen cannot store; use exact or packed")
    return x_HTD.float().transpose(0, 1).contiguous().numpy()


def _symbols(streams: Sequence[Stream], num_tokens: int) -> NDArray[np.int8]:
    """Signed symbols of all streams side by side."""
    table_2L = np.concatenate([stream["table"] for stream in streams], 1)
    if table_2L.max(initial=0) >= gaussian_tables().num_tables:
        raise InvalidEntry("corrupt", f"it names table {table_2L.max()} of {gaussian_tables().num_tables}")
    coded = [Coded(stream["state"], stream["word"]) for stream in streams]
    try:
        symbol_TL = decode(coded, TableChoice(table_2L, _rows(num_tokens)), gaussian_tables())
    except InvalidStream as error:
        raise InvalidEntry("corrupt", str(error)) from error
    return symbol_TL.view(np.int8) ^ -ZERO


def _tensors(stream: Stream, symbol_TL: NDArray[np.int8], specs: TensorSpecs) -> Fields:
    found, begin = {}, 0
    for name, spec in specs.items():
        symbol_TC = symbol_TL[:, begin : begin + _num_channels(spec)]
        begin += _num_channels(spec)
        parts = (stream[f"{name}.{part}"] for part in ("scale", "bin", "mean", "weight"))
        x_THD = dequantise(Quantised(symbol_TC, *parts), spec.shape[2])
        found[name] = torch.from_numpy(x_THD).to(spec.dtype).transpose(0, 1).contiguous()
        if not found[name].isfinite().all():
            raise InvalidEntry("corrupt", f"{name} is not finite")
    return found


def _rows(num_tokens: int) -> NDArray[np.intp]:
    """Row of tables by token: 1 for anchors, 0 for others."""
    found = np.zeros(num_tokens, dtype=np.intp)
    found[::GROUP] = 1
    return found


def _num_tokens(specs: TensorSpecs) -> int:
    return next(iter(specs.values())).shape[1]


def _num_channels(spec: TensorSpec) -> int:
    num_heads, _, head_dim = spec.shape
    return num_heads * head_dim


def _stream_specs(specs: TensorSpecs, packed: Fields) -> dict[str, TensorSpec]:
    """Expected parts of a stream; only the number of words depends on the content."""
    num_lanes, anchors = sum(map(_num_channels, specs.values())), num_anchors(_num_tokens(specs))
    found = {
        "table": TensorSpec(torch.uint8, (2, num_lanes)),
        "state": TensorSpec(torch.uint32, (num_lanes,)),
        "word": TensorSpec(torch.uint16, (packed["word"].numel() if "word" in packed else 0,)),
    }
    for name, spec in specs.items():
        found[f"{name}.scale"] = TensorSpec(torch.float32, (anchors,))
        found[f"{name}.bin"] = TensorSpec(torch.float32, (spec.shape[0],))
        found[f"{name}.mean"] = TensorSpec(torch.float16, (_num_channels(spec),))
        found[f"{name}.weight"] = TensorSpec(torch.uint8, (_num_channels(spec),))
    return found
