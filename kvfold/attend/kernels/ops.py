"""The operators of a decode step, over plain tensors, so that torch.compile and CUDA graphs take them whole.

On CUDA they run the Triton kernels, elsewhere their torch twins. Addresses, lengths and fill counts are read on the
device: a captured graph follows them.

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
from types import ModuleType

import torch
from torch import Tensor

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


@torch.library.custom_op("kvfold::attend_tasks", mutates_args=())
def attend_tasks(
    q: Tensor,
    offset: Tensor | None,
    memory: Tensor,
    task: Tensor,
    order: Tensor | None,
    k_codec: str,
    v_codec: str,
    k_groups: int,
    v_groups: int,
    scale: float,
    has_bias: bool = False,
    has_skip: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output fp32 [capacity, X, D] and log-sum-exp fp32 [capacity, X] of each task that runs.

    q [R, X, D] is in the stored key basis; offset [R, X] is added to q.k before scaling.
    """
    run = _kernel("decode").launch if q.is_cuda else reference.attend_tasks
    found: tuple[Tensor, Tensor] = run(
        q, offset, memory, task, order, k_codec, v_codec, k_groups, v_groups, scale, has_bias, has_skip
    )
    return found


@attend_tasks.register_fake
def _(
    q: Tensor,
    offset: Tensor | None,
    memory: Tensor,
    task: Tensor,
    order: Tensor | None,
    k_codec: str,
    v_codec: str,
    k_groups: int,
    v_groups: int,
    scale: float,
    has_bias: bool = False,
    has_skip: bool = False,
) -> tuple[Tensor, Tensor]:
    shape = (task.shape[0], q.shape[1], q.shape[2])
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvfold::rotated_query", mutates_args=())
def rotated_query(q: Tensor, shift: Tensor, period: Tensor, interleaved: bool) -> Tensor:
    """Queries [R * V, X, D] rotated back by shift [R, V] (int32) positions; period: turns per position, fp64.

    Twice as many channels turn as there are periods; in pairs (2i, 2i + 1) if interleaved, else (i, i + half).
    """
    run = _kernel("rope_shift").launch if q.is_cuda else reference.rotated_query
    found: Tensor = run(q, shift, period, interleaved)
    return found


@rotated_query.register_fake
def _(q: Tensor, shift: Tensor, period: Tensor, interleaved: bool) -> Tensor:
    return q.new_empty(shift.numel(), q.shape[1], q.shape[2])


@torch.library.custom_op("kvfold::centred_query", mutates_args=())
def centred_query(q: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [R, X, D] in the basis of centred keys, in q's dtype, and q.mean, fp32 [R, X].

    mean [R / V, D]: V rows of queries that follow one another share one.
    """
    run = _kernel("hadamard_query").launch if q.is_cuda else reference.centred_query
    found: tuple[Tensor, Tensor] = run(q, mean)
    return found


@centred_query.register_fake
def _(q: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
    return rotated, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvfold::merge_rows", mutates_args=("memory",))
def merge_rows(
    out: Tensor,
    lse: Tensor,
    task_range: Tensor,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    memory: Tensor,
    open_address: Tensor,
    fill: Tensor,
    open_len: int,
    sink_address: Tensor,
    sink_fill: Tensor,
    sink_len: int,
    kv_dtype: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention [R, X, D] in q's dtype over tasks, open block and new slots, and its log-sum-exp fp32 [R, X].

    The new slots [B, H, T, D] are stored at fill .. fill + T - 1 of the open blocks, whose keys and values
    [H, open_len, D] begin at open_address [B, 2]; query g * T + t sees new slots up to t. New slots past the block's
    end are not stored. A lane with fill < 0 gets zeros, stores nothing. sink_fill slots [B] of blocks of sink_len,
    which begin at sink_address [B, 2], are seen by all queries.
    """
    run = _kernel("merge").launch if q.is_cuda else reference.merge_rows
    found: tuple[Tensor, Tensor] = run(
        out, lse, task_range, q, k_new, v_new, memory, open_address, fill, open_len,
        sink_address, sink_fill, sink_len, kv_dtype, scale,
    )  # fmt: skip
    return found


@merge_rows.register_fake
def _(
    out: Tensor,
    lse: Tensor,
    task_range: Tensor,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    memory: Tensor,
    open_address: Tensor,
    fill: Tensor,
    open_len: int,
    sink_address: Tensor,
    sink_fill: Tensor,
    sink_len: int,
    kv_dtype: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    return result, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvfold::task_mass", mutates_args=("mass",))
def task_mass(
    q: Tensor,
    offset: Tensor | None,
    memory: Tensor,
    task: Tensor,
    order: Tensor | None,
    lse: Tensor,
    row_of_task: Tensor,
    k_codec: str,
    k_groups: int,
    scale: float,
    mass: Tensor,
    has_bias: bool = False,
    has_skip: bool = False,
) -> None:
    """Add sum over X of exp(score - lse[row_of_task]) to mass[task.MASS + slot] (fp32, in place); a query whose lse is
    -inf saw nothing and adds nothing."""
    run = _kernel("mass").launch if q.is_cuda else reference.task_mass
    run(q, offset, memory, task, order, lse, row_of_task, k_codec, k_groups, scale, mass, has_bias, has_skip)


@task_mass.register_fake
def _(
    q: Tensor,
    offset: Tensor | None,
    memory: Tensor,
    task: Tensor,
    order: Tensor | None,
    lse: Tensor,
    row_of_task: Tensor,
    k_codec: str,
    k_groups: int,
    scale: float,
    mass: Tensor,
    has_bias: bool = False,
    has_skip: bool = False,
) -> None:
    return None
