"""The operators of a decode step, over plain tensors, so that torch.compile and CUDA graphs take them whole.

On CUDA they run the Triton kernels, elsewhere their torch twins (reference.py), whose signatures they have. Addresses,
lengths and fill counts are read on the device: a captured graph follows them.

    rotated_query   queries moved away from old keys     centred_query  queries as centred keys are stored
    attend_tasks   partial attention of each task       merge_rows     tasks + open block + new slots
    task_mass      attention mass of each stored slot

Tables: a row of `task` (int64, columns in formats.py) is a stretch of adjacent slots; those that `order` names (int32;
None: all) begin in that order, and those of length 0 do not run. Codes, scales, zeros (bf16) and biases (fp32, natural
log) begin at multiples of 16 bytes. `has_skip`: tasks may begin with slots of others (column SKIP). Output row r has
the tasks task_range[r, 0] .. task_range[r, 1] - 1 (int32 [R, 2]). Tables and fill counts may be read while the
operation right before still runs (pdl.py), so it is not the one that writes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

from kvfold.attend.kernels import reference
from kvfold.errors import MissingExtra


def _kernel(name: str) -> ModuleType:
    """A kernel file; they alone import triton."""
    try:
        return importlib.import_module(f"kvfold.attend.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingExtra(
            'tensors on a GPU are read by Triton kernels, and triton is not installed; pip install "kvfold[gpu]"'
        ) from error


def _operator(twin: Callable[..., Any], kernel: str, mutates: tuple[str, ...] = ()) -> CustomOpDef:
    """An operator of the twin's name; on CUDA it is `launch` of a kernel file."""
    found = custom_op(f"kvfold::{twin.__name__}", twin, mutates_args=mutates)
    found.register_kernel("cuda")(lambda *arguments: _kernel(kernel).launch(*arguments))
    return found


attend_tasks = _operator(reference.attend_tasks, "decode")
rotated_query = _operator(reference.rotated_query, "rope_shift")
centred_query = _operator(reference.centred_query, "hadamard_query")
merge_rows = _operator(reference.merge_rows, "merge", mutates=("memory",))
task_mass = _operator(reference.task_mass, "mass", mutates=("mass",))


@attend_tasks.register_fake
def _(q: Tensor, offset: Tensor | None, memory: Tensor, task: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = (task.shape[0], q.shape[1], q.shape[2])
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape[:2], dtype=torch.float32)


@rotated_query.register_fake
def _(q: Tensor, shift: Tensor, *_: object) -> Tensor:
    return q.new_empty(shift.numel(), q.shape[1], q.shape[2])


@centred_query.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
    return rotated, q.new_empty(q.shape[:2], dtype=torch.float32)


@merge_rows.register_fake
def _(out: Tensor, lse: Tensor, task_range: Tensor, q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    return result, q.new_empty(q.shape[:2], dtype=torch.float32)


@task_mass.register_fake
def _(*_: object) -> None:
    return None
