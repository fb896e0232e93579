"""`int8`, `int4`, `int2`: relocatable integer codes with a scale and zero per slot and group of channels.

Keys are stored minus their mean and rotated (codec/hadamard.py), values as they are.

    N flat slots   D head dim   G groups   C channels per group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.codec import grid, packing
from kvfold.codec.base import Field, Fields, KernelFormat, Side, Slots, State
from kvfold.codec.hadamard import CentredCodec
from kvfold.errors import PolicyError
from kvfold.policy.registry import register

_QUAROT = "differs: of QuaRot the rotation of keys alone, grids by slot"


@dataclass(frozen=True)
class IntegerCodec(CentredCodec):
    """Common part; the width in bits and how much of its span a grid covers are data on the class."""

    bits: ClassVar[int]
    clip: ClassVar[float] = 1.0

    group_size: int | None = None  # channels that share scale and zero; None: the whole head

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise PolicyError(f"group_size={self.group_size} must be a positive number of channels; try group_size=64")

    @property
    def kernel(self) -> KernelFormat:
        return KernelFormat("int", self.bits, self.clip)

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        num_groups = head_dim // self._channels(head_dim)
        return (
            Field("code", torch.uint8, packing.packed_width(head_dim, self.bits)),
            Field("scale", grid.META, num_groups),
            Field("zero", grid.META, num_groups),
        )

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        x_ND = self.centred(side, slots, state)
        x_NGC = grid.grouped(x_ND, self._channels(x_ND.shape[-1]))
        kept = grid.stored(grid.span(x_NGC, self.bits, dim=-1, clip=self.clip), self.bits)
        code = packing.pack(grid.to_codes(x_NGC, kept, self.bits).flatten(-2), self.bits)
        return {"code": code, "scale": kept.scale.squeeze(-1), "zero": kept.zero.squeeze(-1)}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        x_ND = packing.unpack(fields["code"], self.bits).float()
        x_NGC = grid.grouped(x_ND, x_ND.shape[-1] // fields["scale"].shape[-1])
        # Two passes in place: addcmul_ with broadcast operands takes 1.5 times as long on a CPU.
        x_NGC.mul_(fields["scale"].float().unsqueeze(-1)).add_(fields["zero"].float().unsqueeze(-1))
        return x_ND.to(dtype)

    def _channels(self, head_dim: int) -> int:
        channels = self.group_size or head_dim
        if head_dim % channels:
            raise PolicyError(
                f"group_size={channels} does not divide the head dim {head_dim}; give a divisor of {head_dim} or leave "
                "it out for one group per head"
            )
        return channels


@register("codec", "int8", paper="arXiv:2404.00456", published=_QUAROT)
@dataclass(frozen=True)
class Int8(IntegerCodec):
    """8-bit codes, one scale and zero per slot; keys minus their mean and rotated."""

    bits: ClassVar[int] = 8


@register("codec", "int4", revision=3, paper="arXiv:2404.00456", published=_QUAROT)
@dataclass(frozen=True)
class Int4(IntegerCodec):
    """4-bit codes, two per byte, one scale and zero per slot; keys minus their mean and rotated; sinks exact."""

    bits: ClassVar[int] = 4
    fp_sinks: ClassVar[int] = 4


@register("codec", "int2", revision=3, paper="arXiv:2404.00456", published=_QUAROT)
@dataclass(frozen=True)
class Int2(IntegerCodec):
    """2-bit codes, four per byte, one scale and zero per slot; keys minus their mean and rotated; sinks exact.

    The grid covers the middle 80 % of the span: with four levels a finer step for most channels is worth more than
    the outermost ones (measured, dev/LOG.md). With 16 levels it is not.
    """

    bits: ClassVar[int] = 2
    fp_sinks: ClassVar[int] = 4
    clip: ClassVar[float] = 0.8
