"""CacheGen's bitstream (arXiv:2310.07240): anchors, differences to them in bins that grow with depth, entropy coded.

Every channel has its distributions, one for anchors and one for differences, chosen among shapes that both sides know.

Differs from the paper: a channel has a mean, and keeps to its anchors by a weight, since values of neighbouring tokens
can be as good as independent; groups are longer; distributions are shapes, not profiles of a model.

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
from kvfold.store.entry.encodings.base import Form, Like, Likes, check_likes
from kvfold.store.entry.encodings.deltas import GROUP, Floats, Quantised, dequantise, num_anchors, quantise
from kvfold.store.entry.encodings.rans import BadStream, Coded, Plan, decode, encode
from kvfold.store.entry.encodings.shapes import ZERO, cheapest, shapes
from kvfold.store.entry.format import Fault, Fields

_BIN_SHARES = (0.3, 0.6, 0.9)  # of a head's mean difference, by thirds of the layers

Stream = dict[str, NDArray[Any]]


class CacheGen(Form):
    """Lossy: about a fifth of the bytes of bf16."""

    name = "cachegen"
    is_exact = False

    def pack(self, fields: Fields, depth: float) -> Fields:
        share = _BIN_SHARES[int(len(_BIN_SHARES) * depth)]
        found = {name: quantise(_floats(x_HTD), share) for name, x_HTD in fields.items()}
        symbol_TL = (np.concatenate([part.symbol_TC for part in found.values()], 1) ^ -ZERO).view(np.uint8)
        row_T = _rows(len(symbol_TL))
        table_2L = np.stack([cheapest(symbol_TL[row_T == row]) for row in (0, 1)])
        coded = encode(symbol_TL, Plan(table_2L, row_T), shapes())
        packed = {"table": table_2L, "state": coded.states_L, "word": coded.words}
        for name, part in found.items():
            side = {"scale": part.scale_A, "bin": part.bin_H, "mean": part.mean_C, "weight": part.weight_C}
            packed |= {f"{name}.{key}": x for key, x in side.items()}
        return {name: torch.from_numpy(x) for name, x in packed.items()}

    def unpack(self, packed: Sequence[Fields], likes: Likes) -> list[Fields]:
        for one in packed:
            check_likes(one, _stream_likes(likes, one))
        streams = [{name: x.numpy() for name, x in one.items()} for one in packed]
        symbols = np.split(_symbols(streams, _num_tokens(likes)), len(streams), axis=1)
        return [_tensors(stream, symbol_TL, likes) for stream, symbol_TL in zip(streams, symbols, strict=True)]


def _floats(x_HTD: Tensor) -> Floats:
    if not x_HTD.isfinite().all():
        raise InputError("keys or values that are not finite cannot be stored in the form cachegen")
    return x_HTD.float().transpose(0, 1).contiguous().numpy()


def _symbols(streams: Sequence[Stream], num_tokens: int) -> NDArray[np.int8]:
    """Around 0, of all streams side by side."""
    table_2L = np.concatenate([stream["table"] for stream in streams], 1)
    if table_2L.max(initial=0) >= shapes().num_tables:
        raise Fault("corrupt", f"it names table {table_2L.max()} of {shapes().num_tables}")
    coded = [Coded(stream["state"], stream["word"]) for stream in streams]
    try:
        symbol_TL = decode(coded, Plan(table_2L, _rows(num_tokens)), shapes())
    except BadStream as error:
        raise Fault("corrupt", str(error)) from error
    return symbol_TL.view(np.int8) ^ -ZERO


def _tensors(stream: Stream, symbol_TL: NDArray[np.int8], likes: Likes) -> Fields:
    found, begin = {}, 0
    for name, like in likes.items():
        symbol_TC = symbol_TL[:, begin : begin + _num_channels(like)]
        begin += _num_channels(like)
        parts = (stream[f"{name}.{part}"] for part in ("scale", "bin", "mean", "weight"))
        x_THD = dequantise(Quantised(symbol_TC, *parts), like.shape[2])
        found[name] = torch.from_numpy(x_THD).to(like.dtype).transpose(0, 1).contiguous()
        if not found[name].isfinite().all():
            raise Fault("corrupt", f"{name} is not finite")
    return found


def _rows(num_tokens: int) -> NDArray[np.intp]:
    """Anchors go by the second row of tables, all others by the first."""
    found = np.zeros(num_tokens, dtype=np.intp)
    found[::GROUP] = 1
    return found


def _num_tokens(likes: Likes) -> int:
    return next(iter(likes.values())).shape[1]


def _num_channels(like: Like) -> int:
    num_heads, _, head_dim = like.shape
    return num_heads * head_dim


def _stream_likes(likes: Likes, packed: Fields) -> dict[str, Like]:
    """What a stream of such tensors consists of; the number of words alone is its own."""
    num_lanes, anchors = sum(map(_num_channels, likes.values())), num_anchors(_num_tokens(likes))
    found = {
        "table": Like(torch.uint8, (2, num_lanes)),
        "state": Like(torch.uint32, (num_lanes,)),
        "word": Like(torch.uint16, (packed["word"].numel() if "word" in packed else 0,)),
    }
    for name, like in likes.items():
        found[f"{name}.scale"] = Like(torch.float32, (anchors,))
        found[f"{name}.bin"] = Like(torch.float32, (like.shape[0],))
        found[f"{name}.mean"] = Like(torch.float16, (_num_channels(like),))
        found[f"{name}.weight"] = Like(torch.uint8, (_num_channels(like),))
    return found
