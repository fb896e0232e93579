"""What a captured decode step gives the model as its cache: `update` hands the packed new slots to the step.

H KV heads   N packed tokens   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HfCache

from kvfold.attend.kernels.step import Step


class StepCache(HfCache):  # type: ignore[misc]
    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self.step = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return StepHandle(self.step, layer_idx, key_states[0], value_states[0]), None

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@dataclass
class StepHandle:
    step: Step
    layer: int
    k_HND: Tensor
    v_HND: Tensor

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        return self.step.attend(self.layer, query[0], self.k_HND, self.v_HND).unsqueeze(0)
