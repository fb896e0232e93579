"""Slots kept as floats: `native` in the dtype the model caches, `bf16` rounded to bf16.

Both keep every slot as it comes, NaN and infinity included: neither shares anything between slots or channels.

    N flat slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.codec.base import Codec, Field, Fields, KernelFormat, Side, Slots, State
from kvfold.policy.registry import register


@register("codec", "native")
@dataclass(frozen=True)
class Native(Codec):
    """The model's own cache dtype, nothing lost. Slots are expected in that dtype."""

    lossless: ClassVar[bool] = True
    as_floats: ClassVar[bool] = True

    @property
    def kernel(self) -> KernelFormat:
        return KernelFormat("float")

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("x", kv_dtype, head_dim),)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["x"].to(dtype)


@register("codec", "bf16")
@dataclass(frozen=True)
class Bf16(Native):
    """Rounded to bf16, 2 bytes per channel; nothing is lost where the model computes in bf16."""

    lossless: ClassVar[bool] = False

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("x", torch.bfloat16, head_dim),)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.to(torch.bfloat16)}
