"""Linear layers of few rows on a CPU, compiled by numba, where PyTorch multiplies matrices by OpenBLAS, MKL or oneDNN.

All copy the weights to another layout in every call, which pays for many rows: for 16 OpenBLAS takes twice the time of
dots of rows with rows as they are stored (cpu_kernels.py), MKL three times that of AVX-512's lanes (avx512_gemm.py),
and oneDNN, which multiplies bf16, twice that of AMX tiles (amx_gemm.py). Accelerate, MKL without AVX-512, and bf16
without AMX are left to their work. Layers of one input (QKV, gate and up) run in one go. Modules are exchanged while
the model runs; their weights are read where they are, but bf16 weights move once to where cache lines begin.

    N rows   K input dims   O output dims
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kvfold.core import HAS_AVX512_KERNELS, HAS_NUMBA, has_amx_kernels
from kvfold.models.attach import ModuleState
from kvfold.models.fused_layers import Exchange, can_join, exchanged, is_bare, known, num_rows
from kvfold.pages.kernels.cpu_threads import run_shared

Floats = NDArray[np.float32]
Weights = NDArray[np.float32] | NDArray[np.uint16]  # fp32, or the bits of bf16

_LINE = 64  # bytes of a cache line
_FEWEST_PRODUCTS = 1 << 20  # that are worth waking another thread
_TOGETHER: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Gemm(NamedTuple):
    """Products of few rows: the fewest, and the most, beyond which BLAS comes close; rows and outputs that it takes at
    once; the fewest inputs and what they are a multiple of. `products(pack(x_NK), w_OK, y_NO, begin, end)` computes
    blocks of outputs."""

    fewest_rows: int
    rows: int
    outputs: int
    fewest_inputs: int
    inputs: int
    most_rows: int
    pack: Callable[[Floats], Floats]
    products: Callable[[Floats, Weights, Floats, int, int], None]


@cache
def is_wanted() -> bool:
    """Whether there are kernels that are faster than PyTorch's BLAS, and numba is there."""
    return HAS_AVX512_KERNELS or (HAS_NUMBA and _is_openblas())


def _is_openblas() -> bool:
    return "BLAS_INFO=open" in torch.__config__.show() and not torch.backends.mkl.is_available()


@cache
def kernels() -> Any:
    """Compiled ones; the file needs numba."""
    from kvfold.models import cpu_kernels

    return cpu_kernels


@cache
def gemm(dtype: torch.dtype) -> Gemm | None:
    """For weights of this type, if kernels multiply them."""
    if dtype == torch.bfloat16:
        return amx_gemm() if has_amx_kernels() else None
    if dtype != torch.float32:
        return None
    return avx512_gemm() if HAS_AVX512_KERNELS else dot_gemm()


@cache
def amx_gemm() -> Gemm:
    from kvfold.models import amx_gemm as kernel

    return Gemm(1, 16, 32, 32, 32, 256, kernel.packed, kernel.products)


@cache
def avx512_gemm() -> Gemm:
    from kvfold.models import avx512_gemm as kernel

    return Gemm(2, 16, 8, 16, 1, 96, kernel.packed, kernel.products)


@cache
def dot_gemm() -> Gemm:
    return Gemm(2, 4, 4, 1, 1, 64, lambda x_NK: x_NK, kernels().products)


def padded_rows(x: Tensor, dtype: torch.dtype) -> Floats:
    """Rows in fp32, as kernels take them for weights of this type, so many that they fill blocks."""
    count, size = num_rows(x), x.shape[-1]
    x_NK, kernel = x.reshape(count, size).float().contiguous(), gemm(dtype)
    missing = -count % kernel.rows if kernel is not None and count <= kernel.most_rows else 0
    found: Floats = (functional.pad(x_NK, (0, 0, 0, missing)) if missing else x_NK).numpy()
    return found


def is_few(x: Tensor) -> bool:
    """Whether kernels multiply so many rows."""
    kernel = gemm(x.dtype)
    return kernel is not None and kernel.fewest_rows <= num_rows(x) <= kernel.most_rows


def is_served(x: Tensor) -> bool:
    """Whether there are kernels for these rows, or for what stands between products of more."""
    kernel = gemm(x.dtype)
    return kernel is not None and num_rows(x) >= kernel.fewest_rows


def weights_of(linear: nn.Linear) -> Weights:
    """The layer's own memory."""
    weight = linear.weight.detach()
    found: Weights = (weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight).numpy()
    return found


class Group:
    """Linear layers of one input; the first call computes the outputs of all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.held: tuple[Tensor, list[Tensor]] | None = None
        self._kept: list[tuple[Any, ...]] = []  # which memory the arrays are
        self._arrays: list[Weights] = []
        self._num_outputs = sum(linear.out_features for linear in self.linears)

    @property
    def dtype(self) -> torch.dtype:
        return self.linears[0].weight.dtype

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Outputs and inputs of each layer."""
        return [tuple(linear.weight.shape) for linear in self.linears]

    def arrays(self) -> list[Weights]:
        """The weights for kernels, which are the layers' own memory."""
        weights = [linear.weight for linear in self.linears]
        now = [(weight.data_ptr(), weight.shape, weight.dtype) for weight in weights]
        if now != self._kept:
            self._kept, self._arrays = now, list(map(weights_of, self.linears))
        return self._arrays

    def output(self, index: int, x: Tensor) -> Tensor:
        held = self.held
        if held is None or held[0] is not x:
            held = self.held = x, self.outputs(x)
        if index == len(self.linears) - 1:
            self.held = None
        return held[1][index]

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Of each layer, in the dtype of x."""
        count = num_rows(x)
        found = self.products(padded_rows(x, self.dtype))
        return [torch.from_numpy(y_NO[:count]).view(*x.shape[:-1], -1).to(x.dtype) for y_NO in found]

    def products(self, x_NK: Floats) -> list[Floats]:
        """Of each layer, fp32, for padded rows."""
        kernel, weights, num_rows = gemm(self.dtype), self.arrays(), len(x_NK)
        if kernel is None or num_rows > kernel.most_rows:
            return self._plain_products(x_NK)
        layers = [(w_OK, np.empty((num_rows, len(w_OK)), dtype=np.float32)) for w_OK in weights]
        num_threads = torch.get_num_threads() if x_NK.size * self._num_outputs >= _FEWEST_PRODUCTS else 1
        x = kernel.pack(x_NK)

        def work(begin: int, end: int) -> None:
            """The same share of every layer."""
            for w_OK, y_NO in layers:
                blocks = -(-len(w_OK) // kernel.outputs)
                kernel.products(x, w_OK, y_NO, blocks * begin // num_threads, blocks * end // num_threads)

        run_shared(work, range(num_threads + 1))
        return self.biased([y_NO for _, y_NO in layers])

    def biased(self, found: Sequence[Floats]) -> list[Floats]:
        """Products with the biases of their layers; of bf16 layers they are bf16 numbers."""
        for linear, y_NO in zip(self.linears, found, strict=True):
            if linear.bias is not None:
                y_NO += linear.bias.detach().float().numpy()
            if self.dtype == torch.bfloat16:
                kernels().round_bf16(y_NO, 0, y_NO.shape[1])
        return list(found)

    def _plain_products(self, x_NK: Floats) -> list[Floats]:
        """By PyTorch, for many rows."""
        x = torch.from_numpy(x_NK).to(self.dtype)
        outs = (functional.linear(x, linear.weight.detach(), linear.bias) for linear in self.linears)
        return [out.detach().float().numpy() for out in outs]


class FewRows(nn.Module):
    """Replaces a linear layer."""

    def __init__(self, plain: nn.Linear, group: Group, index: int) -> None:
        super().__init__()
        self.plain, self.group, self.index, self.dtype = plain, group, index, plain.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        if is_few(x) and x.shape[-1] == self.plain.weight.shape[1]:
            return self.group.output(self.index, x)
        out: Tensor = self.plain(x)
        return out


_exchanges: ModuleState[list[Exchange]] = ModuleState("cpu_linear")
_hooked: ModuleState[list[nn.Module]] = ModuleState("cpu_linear_hooked")


@contextmanager
def few_rows(hf: Any) -> Iterator[None]:
    """Run the linear layers of a model on a CPU by kernels for few rows while the context lasts, where that pays."""
    if hf.device.type != "cpu" or not is_wanted():
        _exchanges.clear(hf)  # they hold weights that a model had on the CPU
        yield
        return
    with exchanged(known(_exchanges, hf, _is_valid, exchanges, _hooked)):
        yield


def _is_valid(exchange: Exchange) -> bool:
    """False if the module was replaced or changed since; another thread may have exchanged it now."""
    found, fused = exchange.parent._modules[exchange.name], cast(FewRows, exchange.fused)
    plain = fused.plain
    return (found is plain or found is fused) and _can_run(plain) and plain.weight.dtype == fused.dtype


def _can_run(linear: Any) -> bool:
    """Asked of every layer before every step."""
    if type(linear) is not nn.Linear or not is_bare(linear):
        return False
    w = linear._parameters.get("weight")
    if type(w) is not nn.Parameter or not w.is_contiguous():
        return False  # a subclass, as of quantised weights, has no numbers of its own
    kernel, (num_outputs, num_inputs) = gemm(w.dtype), w.shape
    if kernel is None or num_inputs % kernel.inputs:
        return False
    return bool(num_outputs >= kernel.outputs and num_inputs >= kernel.fewest_inputs)


@torch.inference_mode(False)
@torch.no_grad()
def exchanges(hf: nn.Module) -> list[Exchange]:
    """The linear layers of a model, those of one input as a group."""
    found = []
    for parent in hf.modules():
        children = dict(parent.named_children())
        groups = [names for names in _TOGETHER if all(name in children for name in names)]
        groups += [(name,) for name in children if not any(name in names for names in groups)]
        for names in groups:
            linears: list[Any] = [children[name] for name in names]
            if can_join(linears) and all(map(_can_run, linears)):
                for linear in linears:
                    _move_to_line(linear)
                group = Group(linears)
                found += [
                    Exchange(parent, name, linear, FewRows(linear, group, index))
                    for index, (name, linear) in enumerate(zip(names, linears, strict=True))
                ]
    return found


def _move_to_line(linear: nn.Linear) -> None:
    """bf16 weights to where a cache line begins, as safetensors files do not have them: AMX takes four times as long to
    load tiles whose rows cross lines."""
    weight = linear.weight
    if weight.dtype != torch.bfloat16 or weight.data_ptr() % _LINE == 0 or weight.is_inference():
        return
    if weight.untyped_storage().nbytes() == weight.nbytes:  # else it may be a view that somebody else writes to
        weight.data = weight.detach().clone()  # PyTorch's own memory begins at lines
