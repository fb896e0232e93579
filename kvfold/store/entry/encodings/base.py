"""Contract of an encoding: how the tensors of one layer are written to an entry and read back.

An entry's digest is checked first. Decoding trusts the content no further: it returns tensors of the expected dtypes
and shapes, or raises InvalidEntry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

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
