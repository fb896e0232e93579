"""All decoder layers of a decode step in one call, on a CPU with AVX-512 (avx512_layer.py).

Layers that run one by one go in and out of kernels several times each, and wait for the interpreter's lock each time
that a server's other threads have it. Here threads are woken once.

    N rows   B sequences   M hidden dims   K dims of the MLP   D head dim   L layers   C columns of a layer
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kvfold.core import HAS_AVX512_KERNELS
from kvfold.models.cpu_linear import Floats, Group, gemm, padded_rows
from kvfold.pages.kernels.cpu_threads import run_phases


@cache
def kernels() -> Any:
    """The file needs numba."""
    from kvfold.models import avx512_layer

    return avx512_layer


@cache
def extend_kernel() -> Any:
    """Only where there is AMX: LLVM cannot compile it elsewhere."""
    from kvfold.models import amx_extend

    return amx_extend.extend


class Room(NamedTuple):
    """Arrays of a layer for kernels, and how they read its weights. Rows of attention that no sequence has are 0."""

    x_NM: Floats  # the input, which becomes the output
    sum_NM: Floats  # of the input and the output projection
    q_NX: Floats
    k_NX: Floats
    v_NX: Floats
    attended_NX: Floats
    out_NM: Floats  # the output projection
    gate_NK: Floats
    up_NK: Floats
    is_bf16: bool  # whether weights, norms' and biases too, are bf16, else fp32


class Parts(NamedTuple):
    """The modules of a layer whose linear layers are replaced already (cpu_linear.py)."""

    attention: Any
    mlp: Any
    before: Any  # norm
    after: Any
    qkv: Group
    out: Group
    gate_up: Group
    down: Group

    @property
    def dtype(self) -> torch.dtype:
        """Of all weights."""
        return self.qkv.dtype

    @property
    def fits(self) -> bool:
        """Whether what a part gives is as wide as what the next one takes: kernels do not look."""
        (q, *kv), (out,), gated, (down,) = (group.shapes for group in self[4:])
        size, head_dim = self.before.weight.numel(), self.attention.head_dim
        inputs = {size, self.after.weight.numel(), out[0], down[0], *(shape[1] for shape in (q, *kv, *gated))}
        are_heads = all(num_outputs % head_dim == 0 for num_outputs, _ in (q, *kv)) and len(set(kv)) == 1
        return inputs == {size} and are_heads and out[1] == q[0] and {shape[0] for shape in gated} == {down[1]}

    @property
    def can_fuse(self) -> bool:
        """Whether parts of outputs are whole blocks, and none but QKV have biases."""
        kernel, groups = gemm(self.dtype), (self.out, self.gate_up, self.down)
        if not HAS_AVX512_KERNELS or kernel is None or any(group.dtype != self.dtype for group in groups):
            return False
        linears = [linear for group in groups for linear in group.linears]
        whole = all(linear.bias is None and _num_outputs(linear) % kernel.outputs == 0 for linear in linears)
        norms = self.before.weight.dtype == self.after.weight.dtype == self.dtype
        return whole and norms and all(_has_plain_bias(linear, self.dtype) for linear in self.qkv.linears)

    @property
    def shapes(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Of weights, which kernels read by their addresses, with their types."""
        linears: list[Any] = [linear for group in self[4:] for linear in group.linears]
        weights = [linear._parameters["weight"] for linear in linears]
        return [(w.dtype, tuple(w.shape)) for w in (*weights, self.before.weight, self.after.weight)]

    def addresses(self) -> list[int]:
        """Columns of kernels."""
        weights = [_address(linear, "weight") for group in self[4:] for linear in group.linears]
        biases = [_address(linear, "bias") for linear in self.qkv.linears]
        before, after = self.before.weight.data_ptr(), self.after.weight.data_ptr()
        return [before, *weights[:3], *biases, weights[3], after, *weights[4:]]

    def epsilons(self) -> tuple[float, float]:
        return self.before.variance_epsilon, self.after.variance_epsilon

    def room(self, x_NM: Floats, attended_NX: Floats | None = None) -> Room:
        sizes = [_num_outputs(linear) for group in self[4:7] for linear in group.linears]
        q, k, v, out, gate, up = (np.empty((len(x_NM), size), dtype=np.float32) for size in sizes)
        attended_NX = np.zeros_like(q) if attended_NX is None else attended_NX
        is_bf16 = self.dtype == torch.bfloat16
        return Room(x_NM, np.empty_like(x_NM), q, k, v, attended_NX, out, gate, up, is_bf16)


def _address(linear: Any, name: str) -> int:
    """Of the weight, or of the bias, or 0."""
    found: Tensor | None = linear._parameters[name]
    return 0 if found is None else found.data_ptr()


def _num_outputs(linear: Any) -> int:
    return len(linear._parameters["weight"])


def _has_plain_bias(linear: Any, dtype: torch.dtype) -> bool:
    bias: Tensor | None = linear._parameters["bias"]
    if bias is None:
        return True
    is_plain = type(bias) is nn.Parameter and bias.dtype == dtype and bias.is_contiguous()
    return is_plain and len(bias) == _num_outputs(linear)


def normed_products(parts: Parts, x_NM: Floats) -> list[Floats]:
    """Queries, keys and values."""
    row_C, (epsilon, _), room = np.array(parts.addresses()), parts.epsilons(), parts.room(x_NM)
    run_phases(lambda phase_PX: kernels().qkv(phase_PX[0], row_C, epsilon, room), 1, torch.get_num_threads())
    return parts.qkv.biased((room.q_NX, room.k_NX, room.v_NX))


def fused_mlp(parts: Parts, x_NM: Floats, attended_NX: Floats) -> Floats:
    """The output projection and the MLP, with what is added before and after."""
    row_C, (_, epsilon), room = np.array(parts.addresses()), parts.epsilons(), parts.room(x_NM.copy(), attended_NX)
    num_phases = kernels().NUM_PHASES
    run_phases(lambda phase_PX: kernels().mlp(phase_PX, row_C, epsilon, room), num_phases, torch.get_num_threads())
    return room.x_NM


class Decoder:
    """The layers of a model, in order."""

    def __init__(self, layers: Sequence[Parts]) -> None:
        self._layers = list(layers)

    @classmethod
    def over(cls, layers: Sequence[Parts]) -> Decoder | None:
        """None where kernels do not have all of them, or a layer stands elsewhere than its number says."""
        in_order = all(parts.attention.layer_idx == index for index, parts in enumerate(layers))
        are_alike = all(parts.can_fuse and parts.shapes == layers[0].shapes for parts in layers)
        return cls(layers) if in_order and are_alike else None

    def __len__(self) -> int:
        return len(self._layers)

    def run(self, hidden_1NM: Tensor, angles: tuple[Floats, Floats], state: Any) -> Tensor:
        """The output of the last layer. `angles`: cosines and sines [N, D]; `state`: an AttentionState of a decode step
        (passes/cpu_step.py), or an ExtendState of a prefill behind a prefix (passes/cpu_extend.py)."""
        layer_LC = np.array([parts.addresses() for parts in self._layers])
        epsilon_L2 = np.array([parts.epsilons() for parts in self._layers])
        room = self._layers[0].room(padded_rows(hidden_1NM, self._layers[0].dtype).copy())
        if hasattr(state, "shared"):
            run, num_phases = kernels().step, kernels().NUM_PHASES + 2 * (len(state.shared.first_N) - 1)
        else:
            run, num_phases = extend_kernel(), kernels().NUM_PHASES
        run_phases(
            lambda phase_PX: run(phase_PX, layer_LC, epsilon_L2, room, angles, state),
            num_phases * len(self._layers),
            torch.get_num_threads(),
        )
        return torch.from_numpy(room.x_NM[: hidden_1NM.shape[1]]).unsqueeze(0).to(hidden_1NM.dtype)
