"""What stands between the matrix products of a decoder layer on a CPU, where they are calls of their own.

So it is for the many rows of a chunk, which PyTorch multiplies; of bf16 models on a CPU with AMX a layer's kernels
multiply them, too (amx_rows.py). Rows of bf16 models stay in bf16 as in transformers, which rounds what every operation
gives; here norms, rotary embedding and SwiGLU round once each.

    N rows   M hidden dims   X heads and their channels   D head dim
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.models.cpu_decoder import Parts
from kvfold.models.cpu_linear import Floats, kernels
from kvfold.pages.kernels.cpu_threads import run_phases, run_shared

_FEWEST_NUMBERS = 1 << 16  # of an array that are worth waking another thread
Halves = NDArray[np.uint16]  # the bits of bf16 numbers
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


class _QKVRoom(NamedTuple):
    """Arrays for tiles (amx_rows.py). Those that they read have room for rows up to a multiple of 32."""

    x_NM: Halves  # the input
    y_NM: Halves  # its norm
    w_X: Halves  # packed weights
    q_NX: Halves
    k_NX: Halves
    v_NX: Halves
    rotated_q_NX: Floats
    rotated_k_NX: Floats


class _MLPRoom(NamedTuple):
    """The same for what comes behind attention."""

    x_NM: Halves  # the input of the layer
    attended_NX: Floats
    bf16_NX: Halves  # the same
    y_NM: Halves  # the output projection, then the norm of the sum
    w_X: Halves  # packed weights
    gate_NK: Halves
    sum_NM: Halves  # the output


@cache
def _tiles() -> Any:
    """Only where there is AMX: LLVM cannot compile them elsewhere."""
    from kvfold.models import amx_rows

    return amx_rows


def has_whole_tiles(parts: Parts) -> bool:
    """Whether kernels take all products of a bf16 layer, many rows of it, too."""
    return parts.can_fuse and all(num_outputs % 32 == 0 for num_outputs, _ in parts.qkv.shapes)


def qkv_bf16(parts: Parts, x_NM: Tensor, angles: Angles) -> list[Tensor]:
    """Queries and keys, rotated and as fp32, and values."""
    q, k, v = (x_NM.new_empty(len(x_NM), num_outputs) for num_outputs, _ in parts.qkv.shapes)
    rotated_q, rotated_k = torch.empty(q.shape), torch.empty(k.shape)
    y_NM, w_X = _whole(x_NM, x_NM.shape[1]), x_NM.new_empty(sum(map(prod, parts.qkv.shapes)))
    rotated = rotated_q.numpy(), rotated_k.numpy()
    room = _QKVRoom(_bits(x_NM), _bits(y_NM), _bits(w_X), _bits(q), _bits(k), _bits(v), *rotated)
    row_C, (epsilon, _) = np.array(parts.addresses()), parts.epsilons()
    run_phases(
        lambda phase_PX: _tiles().qkv(phase_PX, row_C, epsilon, room, angles),
        _tiles().QKV_PHASES,
        torch.get_num_threads(),
    )
    return [rotated_q, rotated_k, v]


def mlp_bf16(parts: Parts, x_NM: Tensor, attended: Tensor) -> Tensor:
    """The output projection and the MLP, with what is added before and after."""
    shapes = [shape for group in (parts.out, parts.gate_up, parts.down) for shape in group.shapes]
    bf16_NX, y_NM, gate_NK = (_whole(x_NM, size) for size in (attended.shape[1], x_NM.shape[1], shapes[-1][1]))
    w_X, found = x_NM.new_empty(sum(map(prod, shapes))), torch.empty_like(x_NM)
    x, *halves = map(_bits, (x_NM, bf16_NX, y_NM, w_X, gate_NK, found))
    room = _MLPRoom(x, attended.contiguous().numpy(), *halves)
    row_C, (_, epsilon) = np.array(parts.addresses()), parts.epsilons()
    run_phases(
        lambda phase_PX: _tiles().mlp(phase_PX, row_C, epsilon, room), _tiles().MLP_PHASES, torch.get_num_threads()
    )
    return found


def _whole(x_NM: Tensor, size: int) -> Tensor:
    """Room for as many rows, up to a multiple of 32."""
    return x_NM.new_empty(-(-len(x_NM) // 32) * 32, size)


def _bits(x: Tensor) -> Halves:
    found: Halves = x.view(torch.uint16).numpy()
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
