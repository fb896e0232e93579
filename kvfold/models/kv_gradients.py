"""Keys and values of a text, with the gradient of the language-modelling loss by each (calibration).

T tokens   H KV heads   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.models.pass_cache import ForwardCache

_LEAST = 2  # tokens: the first predicts the second


class KVGradients(NamedTuple):
    """Of one layer, as they would be cached."""

    k_HTD: Tensor
    v_HTD: Tensor
    by_k_HTD: Tensor  # d loss / d k
    by_v_HTD: Tensor


class _GradientCache(ForwardCache):
    """Returns keys and values plus zeros that require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self.zeros: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.found[layer_idx] = key_states, value_states
        zero_k, zero_v = (torch.zeros_like(x, requires_grad=True) for x in (key_states, value_states))
        self.zeros[layer_idx] = zero_k, zero_v
        return key_states + zero_k, value_states + zero_v


def kv_gradients(hf: Any, ids: Sequence[int]) -> dict[int, KVGradients]:
    """By layer, for a text of at least two tokens; the loss is the sum of -log p of its tokens."""
    assert len(ids) >= _LEAST
    inputs, cache = torch.tensor([list(ids)], device=hf.device), _GradientCache()
    positions = torch.arange(len(ids), device=hf.device).unsqueeze(0)
    with torch.enable_grad():
        logits = hf(inputs, past_key_values=cache, position_ids=positions, use_cache=True).logits[0, :-1]
        loss = functional.cross_entropy(logits.float(), inputs[0, 1:], reduction="sum")
        zeros = [zero for pair in cache.zeros.values() for zero in pair]
        by = iter(torch.autograd.grad(loss, zeros))
    return {
        layer: KVGradients(k[0].detach(), v[0].detach(), next(by)[0], next(by)[0])
        for layer, (k, v) in cache.found.items()
    }
