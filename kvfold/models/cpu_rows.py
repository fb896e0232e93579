"""What stands between the matrix products of a decoder layer on a CPU, where they are calls of their own.

So it is for the many rows of a chunk, which PyTorch multiplies. Rows of bf16 models stay in bf16 as in transformers,
which rounds what every operation gives; here norms, rotary embedding and SwiGLU round once each.

    N rows   M hidden dims   X heads and their channels   D head dim
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kvfold.models.cpu_decoder import Parts
from kvfold.models.cpu_linear import Floats, Group, kernels
from kvfold.pages.kernels.cpu_threads import run_shared

_FEWEST_NUMBERS = 1 << 16  # of an array that are worth waking another thread
Angles = tuple[Floats, Floats]  # cosines and sines [N, D]


def qkv(parts: Parts, x_NM: Floats, angles: Angles) -> list[Floats]:
    """Queries, keys and values, with those of padding; queries and keys are rotated."""
    y_NM = np.empty_like(x_NM)
    _by_rows(kernels().rms_norm, x_NM, y_NM, *_norm(parts.before))
    q, k, v = parts.qkv.products(y_NM)
    rotate(q, k, angles, is_bf16=parts.dtype == torch.bfloat16)
    return [q, k, v]


def rotate(q_NX: Floats, k_NX: Floats, angles: Angles, *, is_bf16: bool) -> None:
    num_rows = len(angles[0])
    for x_NX in (q_NX, k_NX):
        _by_rows(kernels().rotate, x_NX[:num_rows], *angles)
        if is_bf16:
            _by_rows(kernels().round_bf16, x_NX, 0, x_NX.shape[1])


def mlp(parts: Parts, x_NM: Floats, attended: Floats) -> Floats:
    """The output projection and the MLP, with what is added before and after."""
    compiled, (out,) = kernels(), parts.out.products(attended)
    y_NM, sum_NM = np.empty_like(x_NM), np.empty_like(x_NM)
    _by_rows(compiled.add_norm, x_NM, out, sum_NM, y_NM, *_norm(parts.after))
    if parts.dtype == torch.bfloat16:
        _by_rows(compiled.round_bf16, sum_NM, 0, sum_NM.shape[1])
    gate, up = parts.gate_up.products(y_NM)
    _by_rows(compiled.swiglu, gate, up, 0, gate.shape[1])
    (down,) = parts.down.products(gate)
    _by_rows(compiled.add, down, sum_NM)
    return down


def qkv_bf16(parts: Parts, x_NM: Tensor, angles: Angles) -> list[Tensor]:
    """Queries and keys, rotated and as fp32, and values."""
    y_NM = torch.empty_like(x_NM)
    _by_rows(kernels().norm_bf16, _bits(x_NM), _bits(y_NM), *_norm(parts.before))
    q, k, v = _products(parts.qkv, y_NM)
    found = [torch.empty(x_NX.shape) for x_NX in (q, k)]
    for x_NX, out_NX in zip((q, k), found, strict=True):
        _by_rows(kernels().rotate_bf16, _bits(x_NX), out_NX.numpy(), *angles)
    return [*found, v]


def mlp_bf16(parts: Parts, x_NM: Tensor, attended: Tensor) -> Tensor:
    """The output projection and the MLP, with what is added before and after."""
    compiled, (out,) = kernels(), _products(parts.out, attended.to(x_NM.dtype))
    y_NM, sum_NM = torch.empty_like(x_NM), torch.empty_like(x_NM)
    _by_rows(compiled.add_norm_bf16, *map(_bits, (x_NM, out, sum_NM, y_NM)), *_norm(parts.after))
    gate, up = _products(parts.gate_up, y_NM)
    _by_rows(compiled.swiglu_bf16, _bits(gate), _bits(up))
    (down,) = _products(parts.down, gate)
    _by_rows(compiled.add_bf16, _bits(down), _bits(sum_NM))
    return down


def _products(group: Group, x_NM: Tensor) -> list[Tensor]:
    return [functional.linear(x_NM, linear.weight.detach(), linear.bias) for linear in group.linears]


def _bits(x: Tensor) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = x.view(torch.uint16).numpy()
    return found


def _norm(module: Any) -> tuple[Floats, float]:
    return module.weight.detach().float().numpy(), module.variance_epsilon


def _by_rows(kernel: Callable[..., None], *arguments: Any) -> None:
    """The kernel over the rows of its arrays [N, …], shared among threads where they are many."""
    num_rows, size = arguments[0].shape
    num_threads = torch.get_num_threads() if num_rows * size >= _FEWEST_NUMBERS else 1

    def work(begin: int, end: int) -> None:
        mine = slice(num_rows * begin // num_threads, num_rows * end // num_threads)
        kernel(*(x[mine] if isinstance(x, np.ndarray) and x.ndim > 1 else x for x in arguments))

    run_shared(work, range(num_threads + 1))
