"""Codecs: how a kept slot is stored. A codec quantises one side (keys or values) of flat slots to fields, and back.

    N flat slots (any rows)   D head dim

A *field* is one array of a page: `per="slot"` fields hold `width` elements for each slot, `per="group"` fields for each
`group` consecutive slots; `per="page"` fields, for each page, are a reader's (policy/reader.py). A codec is
`relocatable` when a slot's code does not depend on its neighbours (`group` = 1, no group fields): eviction then moves
codes byte for byte. Encoding happens once, at sealing.

Keys may be stored in another basis: `decode` returns them in that basis, and `query` brings the queries into it,
with an offset that is added to every score (q.mean when a mean key was subtracted). Values come back as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.policy.registry import Term

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
Fields = Mapping[str, Tensor]  # field name -> [N, width] (per slot) or [N / group, width] (per group)
State = Mapping[str, Tensor]  # tensor per row: [R, ...]


@dataclass(frozen=True)
class Field:
    name: str
    dtype: torch.dtype
    width: int
    per: Literal["slot", "group", "page"] = "slot"

    def bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Slots:
    """What a codec encodes: N flat slots, the row each belongs to, and for a CrossLayerCodec the same slots of the
    layer below as decoded, in the model's own basis and fp32."""

    x_ND: Tensor
    row_N: Tensor  # int64 index into the state's rows
    below_ND: Tensor | None = None


class KernelFormat(NamedTuple):
    """How CUDA kernels read and write codes: rows of "float", "fp8" with a scale, or "int" on grids."""

    form: Literal["float", "fp8", "int"]
    bits: int = 0  # of a code; 0 for floats
    clip: float = 1.0  # how much of its span an integer grid covers


class Codec(Term, ABC):
    """Stateless; what it computes from the first sealed slots (a mean key) is its State, kept with the segment."""

    relocatable: ClassVar[bool] = True
    needs_below: ClassVar[bool] = False  # True for every CrossLayerCodec
    needs_basis: ClassVar[bool] = False  # True for every LowRankCodec (codec/basis.py)
    lossless: ClassVar[bool] = False
    as_floats: ClassVar[bool] = False  # a slot is one row of floats, field "x", in the model's own basis
    fp_sinks: ClassVar[int] = 0  # first slots of a sequence also kept in full precision (pages/compaction.py)

    @property
    def kernel(self) -> KernelFormat | None:
        """The format that kernels know it by; None: pages and attention use PyTorch."""
        return None

    def group(self, side: Side) -> int:
        """Slots that share metadata; 1 for relocatable codecs."""
        return 1

    @abstractmethod
    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        """The arrays one side needs; their bytes are exactly what a page allocates."""

    def has_state(self, side: Side) -> bool:
        """Whether a side has a state (a mean key) that is computed from its first slots."""
        return type(self).init_state is not Codec.init_state

    def init_state(self, side: Side, x_RSD: Tensor, valid_RS: Tensor) -> State:
        """The state of a side, from the first slots that are sealed; one row per KV head. Default: none."""
        return {}

    @abstractmethod
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        """Codes of N slots; for group fields N is a multiple of the group (the caller repeats the last slot)."""

    @abstractmethod
    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        """Slots [N, D] in `dtype`; keys in the stored basis."""

    def restore(self, side: Side, x_ND: Tensor, state: State, row_N: Tensor) -> Tensor:
        """Decoded slots back in the model's own basis, for scorers and shifted positions."""
        return x_ND

    def query(self, q_RXD: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        """Queries in the stored key basis, and the offset [R, X] to add to q.k (before scaling), or None."""
        return q_RXD, None


class CrossLayerCodec(Codec):
    """Stores a slot against the same slot of the layer below (MiniCache): `encode` and `decode` are given both."""

    needs_below: ClassVar[bool] = True

    @abstractmethod
    def decode(self, side: Side, fields: Fields, dtype: torch.dtype, below_ND: Tensor | None = None) -> Tensor:
        """Slots [N, D] in `dtype`, given those of the layer below in the model's own basis and fp32."""

    def merge_below(self, side: Side, below_ND: Tensor, x_ND: Tensor) -> Tensor:
        """What the layer below stores instead of its new slots, given this layer's x; whole groups, before either is
        encoded. Default: its own."""
        return below_ND

    @property
    def merges_below(self) -> bool:
        """Whether it changes the layer below at all."""
        return type(self).merge_below is not CrossLayerCodec.merge_below
