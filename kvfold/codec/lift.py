"""What the layer below tells of a layer: its keys, or values, by a linear map (AQUA-KV, arXiv:2501.19392).

All heads of a token are one vector of C channels; keys are taken before RoPE, since each layer's map is of what stands
in a token, not of where the token stands.

    H KV heads   n slots of a head   D head dim   C channels of a token, H D
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core import Rope


@dataclass(frozen=True, eq=False)
class Lift:
    """Of one side of one layer, on one device: x = x_below @ weight + bias."""

    weight_CC: Tensor
    bias_C: Tensor
    below_rope: Rope | None = None  # of keys
    rope: Rope | None = None

    def __call__(
        self, below_HnD: Tensor, position_n: Tensor, end: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """fp32 [H, n, D] at their positions; `end` as Rope.turns takes it. In float64 a slot's result does not depend
        on the slots beside it."""
        x_HnD = below_HnD
        if self.below_rope is not None:
            cos_nF, sin_nF = self.below_rope.turns(position_n, end)
            x_HnD = self.below_rope.turn(below_HnD, cos_nF, -sin_nF)
        x_nC = x_HnD.transpose(0, 1).flatten(1).to(dtype)
        told_nC = torch.addmm(self.bias_C.to(dtype), x_nC, self.weight_CC.to(dtype)).float()
        told_HnD = told_nC.unflatten(1, (len(below_HnD), -1)).transpose(0, 1)
        return told_HnD if self.rope is None else self.rope.turn(told_HnD, *self.rope.turns(position_n, end))
