"""Slots to encode, and the way through a codec and back.

R rows   S slots of a row   N flat slots (R * S)   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec.base import Codec, Side, Slots, State

HEAD_DIMS = (48, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Sample:
    """Flat slots of several rows, with the state learned from them."""

    slots: Slots
    state: State


def slots_like_keys(num_rows: int, num_slots: int, head_dim: int, seed: int = 0) -> Tensor:
    """[R, S, D] with what makes real keys hard: channels large for every slot, another set in each row."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(num_rows, 1, head_dim)
    for row in range(num_rows):
        bias[row, 0, row :: head_dim // 4] = 12.0
    return torch.randn(num_rows, num_slots, head_dim, generator=generator) + bias


def sample(codec: Codec, side: Side, x_RSD: Tensor) -> Sample:
    num_rows, num_slots, _ = x_RSD.shape
    state = codec.init_state(side, x_RSD, torch.ones(num_rows, num_slots, dtype=torch.bool))
    return Sample(Slots(x_RSD.flatten(0, 1), torch.arange(num_rows).repeat_interleave(num_slots)), state)


def there_and_back(codec: Codec, side: Side, x_RSD: Tensor) -> Tensor:
    """The slots [R, S, D] as they come back, in the stored basis."""
    of = sample(codec, side, x_RSD)
    return codec.decode(side, codec.encode(side, of.slots, of.state), torch.float32).view_as(x_RSD)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
