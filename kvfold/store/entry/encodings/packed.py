"""Nothing lost, fewer bytes: exponents of neighbouring floats are alike, so their bytes are Huffman coded by zlib.

A float is turned left by one bit, which brings its sign to the end: the top byte is then the exponent of bf16 and fp32,
and that of fp16 with the first bits behind it. The other bytes are noise and stay as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.store.entry.encodings.base import Form, Like, Likes, check_likes
from kvfold.store.entry.format import Fault, Fields

_RAW = -zlib.MAX_WBITS  # neither header nor checksum: entries have their own
_MEMORY_LEVEL = 9  # the highest
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Packed(Form):
    """Bit for bit; about two thirds of the bytes of bf16."""

    name = "packed"

    def pack(self, fields: Fields, depth: float) -> Fields:
        packed = {}
        for name, x in fields.items():
            planes_NB = _planes(x)
            packed[f"{name}.top"] = _deflate(planes_NB[:, -1])
            packed[f"{name}.rest"] = torch.from_numpy(planes_NB[:, :-1].copy())
        return packed

    def unpack(self, packed: Sequence[Fields], likes: Likes) -> list[Fields]:
        return [_unpacked(fields, likes) for fields in packed]


def _unpacked(packed: Fields, likes: Likes) -> Fields:
    check_likes(packed, _packed_likes(likes, packed))
    return {
        name: _joined(_inflate(packed[f"{name}.top"], like.num_values), packed[f"{name}.rest"], like)
        for name, like in likes.items()
    }


def _packed_likes(likes: Likes, packed: Fields) -> dict[str, Like]:
    """The number of Huffman coded bytes alone is the stream's own."""
    found = {}
    for name, like in likes.items():
        found[f"{name}.rest"] = Like(torch.uint8, (like.num_values, like.dtype.itemsize - 1))
        found[f"{name}.top"] = Like(torch.uint8, (packed.get(f"{name}.top", torch.empty(0)).numel(),))
    return found


def _planes(x: Tensor) -> NDArray[np.uint8]:
    """[values, bytes of one], the top byte last."""
    size = x.dtype.itemsize
    bits = x.contiguous().view(torch.uint8).numpy().reshape(-1).view(_UNSIGNED[size])
    return _turned(bits, 1).view(np.uint8).reshape(-1, size)


def _joined(top_N: NDArray[np.uint8], rest: Tensor, like: Like) -> Tensor:
    planes_NB = np.concatenate((rest.numpy(), top_N[:, None]), 1)
    size = like.dtype.itemsize
    bits = _turned(planes_NB.reshape(-1).view(_UNSIGNED[size]), 8 * size - 1)
    return torch.from_numpy(bits.view(np.uint8)).view(like.dtype).view(like.shape)


def _turned(bits: NDArray[Any], by: int) -> NDArray[Any]:
    """Left, in a circle."""
    return (bits << by) | (bits >> (8 * bits.itemsize - by))


def _deflate(plane_N: NDArray[np.uint8]) -> Tensor:
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, _MEMORY_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return torch.frombuffer(bytearray(coder.compress(plane_N.tobytes()) + coder.flush()), dtype=torch.uint8)


def _inflate(coded: Tensor, num_bytes: int) -> NDArray[np.uint8]:
    """Never more than is expected, whatever the stream holds."""
    coder = zlib.decompressobj(_RAW)
    try:
        found = coder.decompress(coded.numpy().tobytes(), num_bytes + 1)
    except zlib.error as error:
        raise Fault("corrupt", f"its exponents cannot be read ({error})") from error
    if len(found) != num_bytes or not coder.eof or coder.unused_data:
        raise Fault("corrupt", f"its exponents are not {num_bytes} bytes")
    return np.frombuffer(found, np.uint8)
