"""What a captured decode step gives the model as its cache: `update` hands the packed new slots to the step.

Which layer is running is told by whoever wraps the layers (`turn_to`), not by the index that the model passes: a
compiled layer would be compiled anew for every value of that number.

    H KV heads   N packed tokens   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attend.kernels.step import Step
from kvfold.models.forward_cache import ForwardCache


class StepCache(ForwardCache):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.layer = 0

    def turn_to(self, layer: int) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        return StepHandle(self, key_states, value_states), None


@dataclass
class StepHandle:
    cache: StepCache
    key_states: Tensor  # [1, H, N, D]
    value_states: Tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Outside of what is compiled: its operators write to the arena, which a compiler would copy to be safe."""
        step, layer = self.cache.step, self.cache.layer
        return step.attend(layer, query[0], self.key_states[0], self.value_states[0]).unsqueeze(0)
