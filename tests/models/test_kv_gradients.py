"""Keys, values and gradients of a text: those of the model's own cache, and of its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from kvfold.models.loader import Model
from kvfold.models.pass_cache import kv_gradients
from tests.tiny import prompt

IDS = prompt(20)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma3"])
def test_slots_are_those_of_the_models_own_cache(shared: Callable[[str], Model], family: str) -> None:
    hf = shared(family).hf
    cache = DynamicCache()
    with torch.inference_mode():
        hf(torch.tensor([IDS]), past_key_values=cache)
    found = kv_gradients(hf, IDS)
    assert sorted(found) == [0, 1, 2]
    for layer, mine in found.items():
        torch.testing.assert_close(mine.k_HTD, cache.layers[layer].keys[0])
        torch.testing.assert_close(mine.v_HTD, cache.layers[layer].values[0])
        assert not mine.k_HTD.requires_grad


def test_gradients_are_those_of_the_loss(model: Model) -> None:
    """The bias of a projection is in every slot: its gradient is the sum of theirs."""
    hf = model.hf
    found = kv_gradients(hf, IDS)
    for layer in (0, 2):
        bias = torch.zeros(32, requires_grad=True)
        hook = hf.model.layers[layer].self_attn.v_proj.register_forward_hook(lambda _, __, out, b=bias: out + b)
        try:
            logits = hf(torch.tensor([IDS]), use_cache=False).logits[0, :-1]
            loss = functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="sum")
            (expected,) = torch.autograd.grad(loss, bias)
        finally:
            hook.remove()
        torch.testing.assert_close(found[layer].by_v_HTD.sum(1).flatten(), expected, atol=1e-3, rtol=1e-3)


def test_the_model_keeps_no_gradients(model: Model) -> None:
    kv_gradients(model.hf, IDS)
    assert all(parameter.grad is None for parameter in model.hf.parameters())
