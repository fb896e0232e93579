"""Fewer kernels give what the model's own modules give, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvfold.models.fused_layers import Exchange, Gated, Norm, Part, exchanged, exchanges
from kvfold.models.kernels import gated, rms_norm
from kvfold.models.spec import decoder_layers
from tests.tiny import build, prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MANY_ROWS = 300  # more than a joint product takes


def built(family: str = "llama") -> Any:
    return build(family).to(DEVICE)


def hidden(model: Any, length: int) -> Tensor:
    ids = torch.tensor([prompt(length)], device=DEVICE)
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False, output_hidden_states=True).logits
    return found


def kinds(found: list[Exchange]) -> dict[type[nn.Module], int]:
    return {kind: sum(type(item.fused) is kind for item in found) for kind in (Part, Gated, Norm)}


@pytest.mark.parametrize(("family", "length"), [("llama", 1), ("llama", 7), ("qwen2", 1), ("qwen2", MANY_ROWS)])
def test_the_model_says_the_same(family: str, length: int) -> None:
    model = built(family)
    expected = hidden(model, length)
    found = exchanges(model)
    assert kinds(found) == {Part: 9, Gated: 3, Norm: 7}
    with exchanged(found):
        torch.testing.assert_close(hidden(model, length), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden(model, length), expected, rtol=1e-5, atol=1e-5)


def test_weights_keep_their_names_and_values_and_follow_changes() -> None:
    model = built("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = exchanges(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    with exchanged(found):
        first = hidden(model, 5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2.0)
    expected = hidden(model, 5)
    assert all(item.is_valid for item in found) and not torch.allclose(first, expected)
    with exchanged(found):
        torch.testing.assert_close(hidden(model, 5), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_moved_are_noticed() -> None:
    model = built()
    found = exchanges(model)
    model.double()
    assert not all(item.is_valid for item in found)


def test_undone_after_an_error() -> None:
    model = built()
    before = dict(model.named_modules())
    with pytest.raises(ZeroDivisionError), exchanged(exchanges(model)):
        raise ZeroDivisionError
    assert dict(model.named_modules()) == before


def test_what_is_unlike_or_watched_stays() -> None:
    assert kinds(exchanges(built("gemma3")))[Gated] == 0  # gates by gelu
    model = built()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)
    model.model.layers[2].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert kinds(exchanges(model)) == {Part: 6, Gated: 1, Norm: 7}


@pytest.mark.parametrize("length", [1, 4])
def test_one_compilation_serves_all_layers(length: int) -> None:
    model = built()
    x = torch.randn(1, length, model.config.hidden_size, device=DEVICE)
    position = model.model.rotary_emb(x, torch.arange(length, device=DEVICE).unsqueeze(0))
    layers = decoder_layers(model)
    torch.compiler.reset()
    run = torch.compile(type(layers[0]).forward, backend="eager", dynamic=False, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True), exchanged(exchanges(model)):
        for layer in layers:
            found = run(layer, x, position_embeddings=position, attention_mask=None)
            expected = type(layer).forward(layer, x, position_embeddings=position, attention_mask=None)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 96), (2, 7, 4, 128)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 3 * torch.randn(shape, device=DEVICE).to(dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    aside = x.transpose(0, 1)
    torch.testing.assert_close(rms_norm(aside, weight, 1e-5), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_gate(dtype: torch.dtype, width: int) -> None:
    both = 4 * torch.randn(2, 3, 2 * width, device=DEVICE).to(dtype)
    gate, up = both.split(width, dim=-1)
    torch.testing.assert_close(gated(gate, up), functional.silu(gate) * up)
    torch.testing.assert_close(gated(gate.contiguous(), up), functional.silu(gate) * up)
