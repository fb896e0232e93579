"""The contract of a form: how the tensors of one layer stand in an entry, and back.

What an entry holds is checked by its digest first. A form trusts it no more than that: what it makes of it has the
dtypes and shapes that the reader expects, whatever the stream says, or is a Fault.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

from kvfold.store.entry.format import Fault, Fields


class Like(NamedTuple):
    """What a reader expects a tensor to be."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


Likes = Mapping[str, Like]


class Form(ABC):
    """`name` is part of what entries are bound to: nobody reads a form that was not asked for."""

    name: ClassVar[str]
    is_exact: ClassVar[bool] = True  # bit for bit what was stored

    @abstractmethod
    def pack(self, fields: Fields, depth: float) -> Fields:
        """Of a layer at a depth of 0 (the first) to below 1: what is written of it."""

    @abstractmethod
    def unpack(self, packed: Sequence[Fields], likes: Likes) -> list[Fields]:
        """The same layer of several entries; Fault where one of them is nothing that `pack` makes of such tensors."""


def check_likes(fields: Fields, likes: Likes) -> Fields:
    """The same fields; Fault unless they are as expected."""
    came = {name: Like(x.dtype, tuple(x.shape)) for name, x in fields.items()}
    if came != likes:
        raise Fault("corrupt", f"its tensors are {came}, not {dict(likes)}")
    return fields


class Exact(Form):
    """As it is: the tensors' own bytes."""

    name = "exact"

    def pack(self, fields: Fields, depth: float) -> Fields:
        return fields

    def unpack(self, packed: Sequence[Fields], likes: Likes) -> list[Fields]:
        return [check_likes(fields, likes) for fields in packed]
