"""A decode step over pages by compiled kernels on a CPU: all sequences and heads of a layer in one go.

B sequences   N rows of the step   R rows (B * H)   Q query heads   H KV heads   G query heads per KV head
T tasks   D head dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend import cpu_kernels as kernels
from kvfold.attend.cpu_kernels import Floats
from kvfold.core import HAS_AVX512_KERNELS
from kvfold.pages.kernels.cpu_threads import run_parts
from kvfold.pages.places import Ints
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.cpu_cascade import Group, SharedSlots, groups_of, shared_slots
from kvfold.passes.cpu_tasks import BatchTasks, batch_tasks, is_served

_LANES = 16  # of a register of AVX-512
Memory = tuple[NDArray[np.uint8], NDArray[np.uint16], Floats]
Partial = tuple[Floats, Floats, Floats]


class AttentionState(NamedTuple):
    """What attention of a step reads and writes, layer by layer, for a kernel that runs all layers."""

    scale_L: NDArray[np.float64]
    is_coded_LB: NDArray[np.bool_]  # whether a sequence reads codes
    mean_LBHD: Floats  # of keys that are centred
    place_LSBH: Ints  # addresses of the new slots, keys and values
    is_bf16: bool  # whether these are bf16, else fp32
    memory: Memory  # the arena
    task_NC: Ints
    first_L: Ints  # task of each layer, and the end
    start_LX: Ints  # in each layer, the first task of every row, and the end
    cut_LX: Ints  # in each layer, where the parts begin that threads take, and the end
    rotated_RGD: Floats  # room for queries in the basis of codes
    offset_RG: Floats  # room for what is added to their scores
    lse_RG: Floats  # room for log-sum-exps
    partial: Partial
    table: Floats  # fp8 numbers by their byte
    shared: SharedSlots  # that sequences read together


@cache
def _fp8_table() -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return found


@dataclass
class CpuStep:
    """`indices`: which sequences of the step it reads; the others need PyTorch."""

    sequences: list[SequenceCache]
    indices: list[int]

    @classmethod
    def over(cls, sequences: Sequence[SequenceCache]) -> CpuStep | None:
        """None where it can read no sequence; all that it reads are in one arena."""
        arena = sequences[0].arena
        indices = [i for i, sequence in enumerate(sequences) if sequence.arena is arena and is_served(sequence)]
        return cls([sequences[index] for index in indices], indices) if indices else None

    def serves(self, layer: int) -> bool:
        """Whether no sequence has passed the layer's sliding window."""
        window = self.sequences[0].spec.layers[layer].sliding_window
        return window is None or all(sequence.logical_len < window for sequence in self.sequences)

    @cached_property
    def index_B(self) -> Tensor:
        return torch.tensor(self.indices)

    @cached_property
    def _groups(self) -> list[Group]:
        return groups_of(self.sequences)

    @cached_property
    def _tasks(self) -> BatchTasks:
        num_shared = {int(index): group.num_shared for group in self._groups for index in group.index_b}
        return batch_tasks(self.sequences, torch.get_num_threads(), num_shared)

    @cached_property
    def _memory(self) -> Memory:
        raw: NDArray[np.uint8] = self.sequences[0].arena.memory.numpy()
        return raw, raw.view(np.uint16), raw.view(np.float32)

    @cached_property
    def _partial(self) -> Partial:
        """Room for the results of the most tasks of a layer."""
        spec, count = self.sequences[0].spec.layers[0], int(np.diff(self._tasks.first_L).max())
        out_TGD, top_TG, sum_TG = (
            np.empty((count, spec.group, *more), dtype=np.float32) for more in ((spec.head_dim,), (), ())
        )
        return out_TGD, top_TG, sum_TG

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        """R, G and D"""
        spec = self.sequences[0].spec.layers[0]
        return len(self.indices) * spec.num_kv_heads, spec.group, spec.head_dim

    @cached_property
    def _room(self) -> tuple[Floats, Floats]:
        """For queries in the basis of codes, and what is added to their scores."""
        return np.empty(self._shape, dtype=np.float32), np.empty(self._shape[:2], dtype=np.float32)

    @property
    def _is_bf16(self) -> bool:
        return self.sequences[0].spec.kv_dtype == torch.bfloat16

    def attend(self, layer: int, q_BQD: Tensor, k_BHD: Tensor, v_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new slots to the open blocks; returns fp32 outputs [B, Q, D] and natural-log-sum-exps [B, H, G]."""
        tasks, spec = self._tasks, self.sequences[0].spec.layers[layer]
        q_RGD = q_BQD.float().clone(memory_format=torch.contiguous_format).view(self._shape)
        rotated_RGD, offset_RG = self._room
        queries = q_RGD.numpy(), rotated_RGD
        new = tuple(x.float().contiguous().flatten(1).numpy() for x in (k_BHD, v_BHD))
        coded = tasks.is_coded_LB[layer], tasks.mean_LBHD[layer]
        place_SBH = self._place_LSBH[layer]
        kernels.prepare(spec.scale, coded, queries, offset_RG, new, place_SBH, self._is_bf16, self._memory)
        rest = tasks.of_layer(layer), queries, offset_RG, self._memory, _fp8_table(), self._partial
        cut_X = tasks.cut_LX[layer]
        num_threads = torch.get_num_threads() if cut_X[1] < cut_X[-1] else 1
        run_parts(lambda counter: self._attend_tasks(counter, cut_X, *rest), num_threads)
        out_RGD, lse_RG = np.empty(self._shape, dtype=np.float32), np.empty(self._shape[:2], dtype=np.float32)
        kernels.merge(tasks.start_LX[layer], self._partial, out_RGD, lse_RG)
        num_rows = len(self.indices), spec.num_kv_heads, spec.group
        found = out_RGD.reshape(*num_rows, -1), lse_RG.reshape(num_rows)
        for group in self._groups:
            group.attend(layer, q_BQD.float(), spec.scale, found)
        return torch.from_numpy(out_RGD).view(q_BQD.shape), torch.from_numpy(found[1])

    def all_layers(self) -> AttentionState | None:
        """None where a layer needs more than kernels: a prefix that none of them reads together, or PyTorch."""
        layers = self.sequences[0].spec.layers
        if not self._is_in_lanes or not all(map(self.serves, range(len(layers)))):
            return None
        shared = shared_slots(self._groups, self.sequences)
        if shared is None:
            return None
        tasks = self._tasks
        return AttentionState(
            np.array([layer.scale for layer in layers]),
            tasks.is_coded_LB,
            tasks.mean_LBHD,
            self._place_LSBH,
            self._is_bf16,
            self._memory,
            tasks.task_NC,
            tasks.first_L,
            tasks.start_LX,
            tasks.cut_LX,
            *self._room,
            np.empty(self._shape[:2], dtype=np.float32),
            self._partial,
            _fp8_table(),
            shared,
        )

    @property
    def _is_in_lanes(self) -> bool:
        return HAS_AVX512_KERNELS and self._shape[2] % _LANES == 0

    @cached_property
    def _attend_tasks(self) -> Callable[..., None]:
        if self._is_in_lanes:
            from kvfold.attend import avx512_decode

            return cast(Callable[..., None], avx512_decode.attend_tasks)
        return cast(Callable[..., None], kernels.attend_tasks)

    @cached_property
    def _place_LSBH(self) -> Ints:
        """Byte addresses of the new slots: behind what is filled of every head of an open block."""
        spec = self.sequences[0].spec
        slot_bytes = spec.layers[0].head_dim * spec.kv_dtype.itemsize
        filled_B1 = np.array([[sequence.open.fill * slot_bytes] for sequence in self.sequences])
        places: Ints = (self._tasks.place_SLBH + filled_B1).swapaxes(0, 1).copy()
        return places
