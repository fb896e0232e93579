"""`kivi4`, `kivi2`: keys per channel within a group of 32 consecutive slots, values per slot in groups of 32 channels.

KIVI (arXiv:2402.02750): key channels differ in size far more than tokens do, so a grid along the tokens of one channel
is finer than one along the channels of a token. The price is that 32 slots share their key grids: a slot cannot move
alone, so eviction takes whole pages or happens before encoding.

Differences from the reference: grids round outwards to bf16 instead of fp16 and survive constant groups; head dims
that 32 does not divide (48, 80) use the largest divisor below for values; the float window before sealing is the
cache's open block, not the codec's.

    N flat slots   D head dim   M groups of 32 slots (N / 32)   T the 32 slots of a group   C channels per value group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.codec import grid, packing
from kvfold.codec.base import Codec, Field, Fields, KernelFormat, Side, Slots, State
from kvfold.errors import InputError
from kvfold.policy.registry import register

GROUP = 32  # slots per key grid, channels per value grid
_KIVI = "differs: the open block is exact (32 newest slots, not 128), grids in bf16"


@dataclass(frozen=True)
class KiviCodec(Codec):
    """Common part; the width in bits is data on the class."""

    relocatable: ClassVar[bool] = False
    bits: ClassVar[int]

    def group(self, side: Side) -> int:
        return GROUP if side == "k" else 1

    @property
    def kernel(self) -> KernelFormat:
        return KernelFormat("int", self.bits)

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        code = Field("code", torch.uint8, packing.packed_width(head_dim, self.bits))
        if side == "k":
            return (code, Field("scale", grid.META, head_dim, "group"), Field("zero", grid.META, head_dim, "group"))
        num_groups = head_dim // _value_channels(head_dim)
        return (code, Field("scale", grid.META, num_groups), Field("zero", grid.META, num_groups))

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        x_ND = grid.finite(slots.x_ND)
        x, dim = (_by_slots(x_ND), 1) if side == "k" else (grid.grouped(x_ND, _value_channels(x_ND.shape[-1])), 2)
        kept = grid.stored(grid.span(x, self.bits, dim), self.bits)
        code_ND = grid.to_codes(x, kept, self.bits).view(x_ND.shape)
        return {
            "code": packing.pack(code_ND, self.bits),
            "scale": kept.scale.squeeze(dim),
            "zero": kept.zero.squeeze(dim),
        }

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        x_ND = packing.unpack(fields["code"], self.bits).float()
        if side == "k":
            x, dim = _by_slots(x_ND), 1
        else:
            x, dim = grid.grouped(x_ND, x_ND.shape[-1] // fields["scale"].shape[-1]), 2
        x.mul_(fields["scale"].float().unsqueeze(dim)).add_(fields["zero"].float().unsqueeze(dim))
        return x_ND.to(dtype)


@register("codec", "kivi4", paper="arXiv:2402.02750", published=_KIVI)
@dataclass(frozen=True)
class Kivi4(KiviCodec):
    """4-bit codes; keys per channel over 32 slots, values per slot over 32 channels. Slots cannot move alone."""

    bits: ClassVar[int] = 4


@register("codec", "kivi2", paper="arXiv:2402.02750", published=_KIVI)
@dataclass(frozen=True)
class Kivi2(KiviCodec):
    """2-bit codes; keys per channel over 32 slots, values per slot over 32 channels. Slots cannot move alone."""

    bits: ClassVar[int] = 2


def _by_slots(x_ND: Tensor) -> Tensor:
    """A view [M, T, D]: consecutive slots by 32."""
    num_slots, head_dim = x_ND.shape
    if num_slots % GROUP:
        raise InputError(f"{num_slots} slots do not fill key groups of {GROUP}; repeat the last slot to a multiple")
    return x_ND.view(num_slots // GROUP, GROUP, head_dim)


def _value_channels(head_dim: int) -> int:
    """32, or the largest divisor of the head dim below it."""
    return next(channels for channels in range(GROUP, 0, -1) if head_dim % channels == 0)
