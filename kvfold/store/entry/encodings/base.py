"""Contract of an encoding: how the tensors of one layer are written to an entry and read back; the lossless ones.

An entry's digest is checked first. Decoding trusts the content no further: it returns tensors of the expected dtypes
and shapes, or raises InvalidEntry.

`packed`: exponents have low entropy, so their bytes are Huffman coded by zlib. Bits are rotated left by one, which
moves the sign to the end: the top byte is then the exponent of bf16 and fp32, and that of fp16 with the first mantissa
bits. The other bytes are stored as they are.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.store.entry.format import Fields, InvalidEntry


class TensorSpec(NamedTuple):
    """Expected dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


TensorSpecs = Mapping[str, TensorSpec]


class Encoding(ABC):
    """`name` is part of the binding: a store reads entries of its own encoding only."""

    name: ClassVar[str]
    is_exact: ClassVar[bool] = True  # lossless

    @abstractmethod
    def pack(self, fields: Fields, depth: float) -> Fields:
        """Encode a layer at a relative depth from 0 (the first) to below 1."""

    @abstractmethod
    def unpack(self, packed: Sequence[Fields], specs: TensorSpecs) -> list[Fields]:
        """Decode the same layer of several entries; InvalidEntry if one is no output of `pack` for such tensors."""


def check_specs(fields: Fields, specs: TensorSpecs) -> Fields:
    """The same fields; InvalidEntry unless they match."""
    came = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in fields.items()}
    if came != specs:
        raise InvalidEntry("corrupt", f"its tensors are {came}, not {dict(specs)}")
    return fields


class Exact(Encoding):
    """The tensors' own bytes."""

    name = "exact"

    def pack(self, fields: Fields, depth: float) -> Fields:
        return fields

    def unpack(self, packed: Sequence[Fields], specs: TensorSpecs) -> list[Fields]:
        return [check_specs(fields, specs) for fields in packed]


_RAW = -zlib.MAX_WBITS  # neither header nor checksum: entries have their own
_MEMORY_LEVEL = 9  # the highest
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Packed(Encoding):
    """Lossless; about two thirds of the bytes of bf16."""

    name = "packed"

    def pack(self, fields: Fields, depth: float) -> Fields:
        packed = {}
        for name, x in fields.items():
            planes_NB = _planes(x)
            packed[f"{name}.top"] = _deflate(planes_NB[:, -1])
            packed[f"{name}.rest"] = torch.from_numpy(planes_NB[:, :-1].copy())
        return packed

    def unpack(self, packed: Sequence[Fields], specs: TensorSpecs) -> list[Fields]:
        for one in packed:
            check_specs(one, _packed_specs(specs, one))
        return [
            {name: _joined(one[f"{name}.top"], one[f"{name}.rest"], x) for name, x in specs.items()} for one in packed
        ]


def _packed_specs(specs: TensorSpecs, packed: Fields) -> dict[str, TensorSpec]:
    """Expected parts; only the number of Huffman-coded bytes depends on the content."""
    found = {}
    for name, spec in specs.items():
        found[f"{name}.rest"] = TensorSpec(torch.uint8, (spec.num_values, spec.dtype.itemsize - 1))
        found[f"{name}.top"] = TensorSpec(torch.uint8, (packed.get(f"{name}.top", torch.empty(0)).numel(),))
    return found


def _planes(x: Tensor) -> NDArray[np.uint8]:
    """[values, bytes of one], the top byte last."""
    size = x.dtype.itemsize
    bits = x.contiguous().view(torch.uint8).numpy().reshape(-1).view(_UNSIGNED[size])
    return _turned(bits, 1).view(np.uint8).reshape(-1, size)


def _joined(top: Tensor, rest: Tensor, spec: TensorSpec) -> Tensor:
    planes_NB = np.concatenate((rest.numpy(), _inflate(top, spec.num_values)[:, None]), 1)
    size = spec.dtype.itemsize
    bits = _turned(planes_NB.reshape(-1).view(_UNSIGNED[size]), 8 * size - 1)
    return torch.from_numpy(bits.view(np.uint8)).view(spec.dtype).view(spec.shape)


def _turned(bits: NDArray[Any], by: int) -> NDArray[Any]:
    """Rotate left."""
    return (bits << by) | (bits >> (8 * bits.itemsize - by))


def _deflate(plane_N: NDArray[np.uint8]) -> Tensor:
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, _MEMORY_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return torch.frombuffer(bytearray(coder.compress(plane_N.tobytes()) + coder.flush()), dtype=torch.uint8)


def _inflate(coded: Tensor, num_bytes: int) -> NDArray[np.uint8]:
    """Allocates at most `num_bytes` + 1, whatever the stream holds."""
    coder = zlib.decompressobj(_RAW)
    try:
        found = coder.decompress(coded.numpy().tobytes(), num_bytes + 1)
    except zlib.error as error:
        raise InvalidEntry("corrupt", f"its exponents cannot be read ({error})") from error
    if len(found) != num_bytes or not coder.eof or coder.unused_data:
        raise InvalidEntry("corrupt", f"its exponents are not {num_bytes} bytes")
    return np.frombuffer(found, np.uint8)
