"""Linear layers for few rows on a CPU give what PyTorch's give, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvfold.models.cpu_linear import FewRows, Group, exchanges, few_rows, gemm
from kvfold.models.fused_layers import exchanged
from tests.tiny import build, prompt

pytest.importorskip("numba")


def logits(model: Any, length: int) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([prompt(length)]), use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
def test_the_model_says_the_same(family: str, length: int) -> None:
    model = build(family)
    expected = logits(model, length)
    with exchanged(exchanges(model)):
        assert isinstance(model.model.layers[0].mlp.down_proj, FewRows)
        torch.testing.assert_close(logits(model, length), expected, rtol=1e-4, atol=1e-4)
        for parameter in model.parameters():  # weights that are changed or replaced count
            parameter.data = parameter.data * 0.9
        changed = logits(model, length)
    torch.testing.assert_close(changed, logits(model, length), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(changed, expected)
    assert all(type(module) is not FewRows for module in model.modules())


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", [(2, 8), (5, 10), (40, 12), (64, 1001)])  # rows, and outputs that fill no block
def test_products_of_any_shape(shape: tuple[int, int], num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, shape[0], 50, generator=generator)
    linears = [nn.Linear(50, shape[1]), nn.Linear(50, shape[1] + 1, bias=False)]
    group, before = Group(linears), torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            found = group.outputs(x)
            alone = group.outputs(x[:, :2])
    finally:
        torch.set_num_threads(before)
    for linear, mine, first in zip(linears, found, alone, strict=True):
        torch.testing.assert_close(mine, linear(x).detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(mine[:, :2], first)  # whatever stands beside a row


def test_layers_that_changed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.models.cpu_linear.is_wanted", lambda: True)
    model = build("llama")
    attention: Any = model.model.layers[0].self_attn
    mlp: Any = model.model.layers[0].mlp
    with few_rows(model), few_rows(model):  # as of two threads
        pass
    with few_rows(model):
        assert {type(attention.q_proj), type(mlp.up_proj)} == {FewRows}
    mlp.up_proj.register_forward_hook(lambda *_: None)
    attention.q_proj = nn.Sequential(attention.q_proj)
    with few_rows(model):
        assert isinstance(attention.q_proj, nn.Sequential) and type(mlp.up_proj) is nn.Linear
    model.to(torch.float16)
    with few_rows(model):
        assert type(mlp.down_proj) is nn.Linear


@pytest.mark.parametrize("sizes", [(8, 64), (64, 4)])  # as low-rank adapters have them
def test_layers_that_fill_no_register_stay_with_pytorch(sizes: tuple[int, int]) -> None:
    module = nn.Module()
    module.add_module("lora_B", nn.Linear(*sizes, bias=False))
    kernel = gemm(torch.float32)
    assert kernel is not None
    assert not exchanges(module) or (sizes[0] >= kernel.fewest_inputs and sizes[1] >= kernel.outputs)
