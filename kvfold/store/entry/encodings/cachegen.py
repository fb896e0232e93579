"""CacheGen's KV bitstream (arXiv:2310.07240): anchors, deltas in bins that grow with depth, entropy coding.

Of a group of tokens the first is an 8-bit anchor, the others are quantized differences to it:

    tokens 0, GROUP, 2 GROUP …: x is about symbol · scale of the token
    all others:                 x is about mean + weight · (anchor - mean) of the channel + symbol · bin of the head

Every channel has two distributions, for anchors and for deltas, chosen among fixed Gaussian tables.

Differences from the reference: a channel has a mean and a weight of its anchor, since values of neighbouring tokens can
be almost independent; groups are longer; distributions are fixed tables, not profiles of a model.

    T tokens   A anchors   H heads   C channels of all heads   L lanes: the channels of all fields, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.errors import InputError
from kvfold.store.entry.encodings.base import Encoding, TensorSpec, TensorSpecs, check_specs
from kvfold.store.entry.encodings.rans import (
    ZERO,
    Coded,
    InvalidStream,
    TableChoice,
    cheapest_table,
    decode,
    encode,
    gaussian_tables,
)
from kvfold.store.entry.format import Fields, InvalidEntry

GROUP = 64  # tokens
_MOST = 127  # symbols on either side of 0
_WEIGHTS = 8  # steps of a weight from 0 to 1
_MOST_FP16 = np.float32(65504)

Floats = NDArray[np.float32]


class Quantised(NamedTuple):
    symbol_TC: NDArray[np.int8]
    scale_A: Floats
    bin_H: Floats
    mean_C: NDArray[np.float16]
    weight_C: NDArray[np.uint8]


def quantise(x_THD: Floats, bin_share: float) -> Quantised:
    """A head's bin is `bin_share` of its mean difference, or wider if needed to fit the largest one."""
    x_TC = x_THD.reshape(len(x_THD), -1)
    anchor_AC = x_TC[::GROUP]
    scale_A = np.abs(anchor_AC).max(1) / np.float32(_MOST)
    anchor_symbol_AC = np.rint(_divide(anchor_AC, scale_A[:, None]))
    mean_C = _means(x_TC)
    base_TC = _spread(anchor_symbol_AC * scale_A[:, None], len(x_TC)) - mean_C
    weight_C = _weights(x_TC - mean_C, base_TC)
    difference_THD = (x_TC - mean_C - _weighted(base_TC, weight_C)).reshape(x_THD.shape)
    difference_THD[::GROUP] = 0
    size_THD = np.abs(difference_THD)
    bin_H = np.maximum(np.float32(bin_share) * size_THD.mean((0, 2)), size_THD.max((0, 2)) / np.float32(_MOST))
    symbol_TC = np.rint(_divide(difference_THD, bin_H[:, None])).reshape(x_TC.shape)
    symbol_TC[::GROUP] = anchor_symbol_AC
    return Quantised(symbol_TC.astype(np.int8), scale_A, bin_H, mean_C.astype(np.float16), weight_C)


def dequantise(found: Quantised, head_dim: int) -> Floats:
    """[T, H, D]; not finite only where scales, bins or means are not finite or too large."""
    symbol_TC, num_tokens = found.symbol_TC.astype(np.float32), len(found.symbol_TC)
    mean_C = found.mean_C.astype(np.float32)
    anchor_AC = symbol_TC[::GROUP] * found.scale_A[:, None]
    x_TC = symbol_TC * np.repeat(found.bin_H, head_dim) + mean_C
    x_TC += _weighted(_spread(anchor_AC, num_tokens) - mean_C, found.weight_C)
    x_TC[::GROUP] = anchor_AC
    return x_TC.reshape(num_tokens, -1, head_dim)


def _spread(anchor_AC: Floats, num_tokens: int) -> Floats:
    """Each token's anchor."""
    return np.repeat(anchor_AC, GROUP, 0)[:num_tokens]


def _means(x_TC: Floats) -> Floats:
    """Channel means over non-anchor tokens, rounded to fp16: a prompt's first token is often an outlier."""
    others_NC = np.delete(x_TC, np.s_[::GROUP], 0)
    mean_C: Floats = others_NC.sum(0) / np.float32(max(len(others_NC), 1))
    return mean_C.clip(-_MOST_FP16, _MOST_FP16).astype(np.float16).astype(np.float32)


def _weights(x_TC: Floats, base_TC: Floats) -> NDArray[np.uint8]:
    """Least-squares weight of a channel's anchor, over non-anchor tokens."""
    x_NC, base_NC = (np.delete(part_TC, np.s_[::GROUP], 0) for part_TC in (x_TC, base_TC))
    share_C: Floats = _divide((x_NC * base_NC).sum(0), (base_NC * base_NC).sum(0))
    steps_C: Floats = np.rint(_WEIGHTS * share_C.clip(0, 1))
    return steps_C.astype(np.uint8)


def _weighted(base_TC: Floats, weight_C: NDArray[np.uint8]) -> Floats:
    return base_TC * (weight_C.astype(np.float32) / np.float32(_WEIGHTS))


def _divide(x: Floats, by: Floats) -> Floats:
    """0 where `by` is 0 (x is 0 there, too)."""
    return np.divide(x, by, out=np.zeros_like(x), where=by > 0)


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
    num_lanes, anchors = sum(map(_num_channels, specs.values())), -(-_num_tokens(specs) // GROUP)
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
