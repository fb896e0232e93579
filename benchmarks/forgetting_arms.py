"""What learns in the weights of a model: all of them, or low-rank updates (LoRA).

B rows   T tokens   E hidden
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.forgetting_facts import Rows


class FullLearner:
    """All weights are trained."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.trained: list[nn.Parameter] = list(hf.parameters())
        self._before = self.state()

    def hidden(self, rows: Rows) -> Tensor:
        """[B, T, E]: before the output embedding."""
        found: Tensor = self.hf.model(rows.ids_BT, attention_mask=rows.mask_BT.long(), use_cache=False)[0]
        return found

    @contextmanager
    def limited(self) -> Iterator[None]:
        """An optimizer step inside changes only what the arm may change."""
        yield

    def state(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.trained]

    @torch.no_grad()
    def restore(self, state: Sequence[Tensor]) -> None:
        for each, before in zip(self.trained, state, strict=True):
            each.copy_(before)

    def close(self) -> None:
        """Leave the model as it was."""
        self.restore(self._before)


class LoraLearner(FullLearner):
    """Low-rank updates of every linear layer of the blocks (arXiv:2106.09685), scaled by 2."""

    def __init__(self, hf: Any, rank: int = 8) -> None:
        self.hf, self.trained, self._hooks = hf, [], []
        for module in hf.model.layers.modules():
            if isinstance(module, nn.Linear):
                self._hooks.append(module.register_forward_hook(self._adapter(module, rank)))

    def _adapter(self, linear: nn.Linear, rank: int) -> Any:
        weight = linear.weight
        down = nn.Parameter(torch.randn(rank, linear.in_features).to(weight) / linear.in_features**0.5)
        up = nn.Parameter(weight.new_zeros(linear.out_features, rank))
        self.trained += [down, up]

        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + 2 * (inputs[0] @ down.T) @ up.T

        return add

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
