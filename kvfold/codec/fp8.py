"""`fp8`: e4m3 floats with one scale per slot, so that each slot's largest magnitude becomes 448, the format's largest.

A scale per slot instead of one per tensor follows from the huge key channels of some models, under which one scale
for all costs most of the accuracy. Floats have a relative precision (2^-4, down to 2^-6 of the scaled range), so such a
channel would come back with an error larger than what differs from token to token in all others: keys are stored minus
their mean and rotated (codec/hadamard.py).

    N flat slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec import grid
from kvfold.codec.base import Field, Fields, KernelFormat, Side, Slots, State
from kvfold.codec.hadamard import CentredCodec
from kvfold.policy.registry import register

_FORMAT = torch.float8_e4m3fn
LARGEST = 448.0


@register("codec", "fp8", revision=2)
@dataclass(frozen=True)
class Fp8(CentredCodec):
    """8-bit floats (e4m3), one scale per slot; keys minus their mean and rotated.

    The bits are kept as bytes, which every gather can move.
    """

    @property
    def kernel(self) -> KernelFormat:
        return KernelFormat("fp8", 8)

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("code", torch.uint8, head_dim), Field("scale", grid.META, 1))

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        x_ND = self.centred(side, slots, state)
        scale_N1 = grid.rounded_up(grid.divided(x_ND.abs().amax(-1, keepdim=True), LARGEST))
        code_ND = (x_ND / grid.divisor(scale_N1)).to(_FORMAT).view(torch.uint8)
        return {"code": code_ND, "scale": scale_N1}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["code"].view(_FORMAT).float().mul_(fields["scale"].float()).to(dtype)
