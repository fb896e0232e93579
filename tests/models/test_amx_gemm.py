"""Products of bf16 weights by AMX tiles are those of plain operations, whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvfold.core import has_amx_kernels
from kvfold.models.cpu_linear import Group, amx_gemm, exchanges

if not has_amx_kernels():
    pytest.skip("needs AMX and numba", allow_module_level=True)


def linears(num_inputs: int, *num_outputs: int) -> list[nn.Linear]:
    """The first with a bias."""
    torch.manual_seed(0)
    found = [nn.Linear(num_inputs, size, bias=not i) for i, size in enumerate(num_outputs)]
    return [linear.to(torch.bfloat16) for linear in found]


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    """Products of bf16 numbers, summed in float64."""
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_rows", [2, 16, 17, 33, 96, 256])
@pytest.mark.parametrize("num_inputs", [32, 96, 576])
def test_products_of_any_shape(num_inputs: int, num_rows: int, num_threads: int) -> None:
    """Outputs that fill no block, too."""
    layers, before = linears(num_inputs, 32, 50, 193), torch.get_num_threads()
    x = torch.randn(1, num_rows, num_inputs, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            group = Group(layers)
            found, first = group.outputs(x), group.outputs(x[:, :2])
    finally:
        torch.set_num_threads(before)
    for linear, mine, alone in zip(layers, found, first, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), exact(linear, x).detach(), rtol=2**-8, atol=1e-4)
        assert torch.equal(mine[:, :2], alone)


def test_rows_are_rounded_to_the_nearest_number() -> None:
    """Ties to even; infinities and NaN stay in their rows."""
    layers = linears(32, 32, 32)[1:]
    layers[0].weight.data.zero_()
    layers[0].weight.data[:, 0] = 1
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.1415926, 1e38, torch.inf, torch.nan, 2.0])
    x = torch.zeros(len(numbers), 32)
    x[:, 0] = numbers
    (found,) = Group(layers).products(torch.nn.functional.pad(x, (0, 0, 0, 8)).numpy())
    expected = numbers.to(torch.bfloat16).float().unsqueeze(1).expand(-1, 32)
    torch.testing.assert_close(torch.from_numpy(found[:8]), expected, rtol=0, atol=0, equal_nan=True)
    assert not found[8:].any()


@pytest.mark.parametrize("sizes", [(64, 16), (48, 64)])  # fewer outputs than a block; inputs that fill no tile
def test_layers_that_fill_no_tile_stay_with_pytorch(sizes: tuple[int, int]) -> None:
    module = nn.Module()
    module.add_module("odd", linears(*sizes)[0])
    assert not exchanges(module)
    assert amx_gemm().inputs == 32
