"""Attention to a document in the KV blocks of another engine (pages/block_arena.py).

Every query sees every stored slot, so the queries of all requests on one document are read in one call, and merged
with the requests' own tokens by their log-sum-exp. A GPU reads codes with the kernels of a decode step; a CPU, and a
GPU with many queries, decode them first, as a prefill of kvfold does.

    H KV heads   G query heads per KV head   T queries   D head dim   C tasks of a head, padded
    t queries of a tile   R rows (head, tile)   X queries of a row (G * t)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.attend.kernels import ops
from kvfold.attend.kernels.formats import CODECS, LENGTH, NUM_COLUMNS, QUERY, SKIP, codec_name, format_of, num_groups
from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import KVPart, row_parts
from kvfold.pages.block_arena import BlockPages
from kvfold.pages.places import columns, slot_strides
from kvfold.pages.read import in_basis

_ROW_QUERIES = 16  # of a row: what a decode kernel's program holds well
_MOST_QUERIES = 128  # of a head: with more, decoding once is cheaper than reading codes in every row
_SPLIT = 256  # slots of a task


def merge_blocks(
    merge: LseMerge, stored: BlockPages, q_HGTD: Tensor, scale: float, *, kernels: bool | None = None
) -> None:
    """Merge attention to all slots of a document, which queries meet at the positions they were stored with.

    `kernels`: whether codes are read by the operators of a decode step; None: on a GPU, for few queries.
    """
    skip = stored.layout.num_sinks
    if stored.sinks is not None:
        k_HSD, v_HSD = (side.to(q_HGTD.dtype) for side in stored.sinks)
        sinks = KVPart(slice(0, len(k_HSD)), [0] * len(k_HSD), q_HGTD, k_HSD, v_HSD)
        merge.add(sinks.heads, *sinks.attend(scale))
    if kernels is None:
        is_short = q_HGTD.shape[1] * q_HGTD.shape[2] <= _MOST_QUERIES
        kernels = q_HGTD.is_cuda and is_short and has_kernels(stored)
    if kernels:
        merge.add(slice(0, len(q_HGTD)), *attend_tasks(stored, q_HGTD, scale))
        return
    for part in row_parts([stored.pages], q_HGTD, skip):
        merge.add(part.heads, *part.attend(scale))


def has_kernels(stored: BlockPages) -> bool:
    """Whether kernels read the codecs of a layer."""
    page_class = stored.layout.page_class
    for codec in (page_class.k, page_class.v):
        name = codec_name(codec, page_class.kv_dtype)
        if name not in CODECS or format_of(name).width(page_class.head_dim) % 2:
            return False
    return True


def attend_tasks(stored: BlockPages, q_HGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output fp32 [H, G, T, D] and natural-log-sum-exp [H, G, T] over all slots but the full-precision sinks."""
    heads, group, num_queries, head_dim = q_HGTD.shape
    tile = max(1, min(num_queries, _ROW_QUERIES // group))
    tiles = -(-num_queries // tile)
    padded_HGTD = functional.pad(q_HGTD, (0, 0, 0, tiles * tile - num_queries))
    q, offset = in_basis(stored.pages, padded_HGTD)
    q_RXD = q.unflatten(2, (tiles, tile)).transpose(1, 2).reshape(heads * tiles, group * tile, head_dim)
    offset_RX = None
    if offset is not None:
        offset_RX = offset.unflatten(2, (tiles, tile)).transpose(1, 2).reshape(heads * tiles, group * tile)
    task_RCN = _of_rows(_tasks(stored), tiles)
    page_class = stored.layout.page_class
    _, k_scale, _, _, v_scale, *_ = columns(page_class)
    out, lse = ops.attend_tasks(
        q_RXD,
        offset_RX,
        stored.arena.memory,
        task_RCN.flatten(0, 1),
        None,
        codec_name(page_class.k, page_class.kv_dtype),
        codec_name(page_class.v, page_class.kv_dtype),
        num_groups(k_scale),
        num_groups(v_scale),
        scale,
        has_bias=page_class.has_bias,
        has_skip=stored.layout.num_sinks > 0,
    )
    out_RXD, lse_RX = _merged(out, lse, task_RCN)
    shape = (heads, tiles, group, tile)
    out_HGTD = out_RXD.view(*shape, head_dim).transpose(1, 2).flatten(2, 3)[:, :, :num_queries]
    return out_HGTD, lse_RX.view(shape).transpose(1, 2).flatten(2, 3)[:, :, :num_queries]


def _merged(out: Tensor, lse: Tensor, task_RCN: Tensor) -> tuple[Tensor, Tensor]:
    """The tasks of every row as one part; what tasks of length 0 hold is undefined."""
    runs_RC = task_RCN[..., LENGTH] > 0
    out_RCXD = out.unflatten(0, runs_RC.shape).masked_fill(~runs_RC[..., None, None], 0.0)
    lse_RCX = lse.unflatten(0, runs_RC.shape).masked_fill(~runs_RC[..., None], -torch.inf)
    weight_RCX = lse_RCX.softmax(1).nan_to_num(0.0)  # of heads without slots
    return (weight_RCX.unsqueeze(-1) * out_RCXD).sum(1), lse_RCX.logsumexp(1)


def _of_rows(task_HCN: Tensor, tiles: int) -> Tensor:
    """The tasks of each head for every tile of its queries."""
    task_RCN = task_HCN.repeat_interleave(tiles, 0)
    task_RCN[..., QUERY] = torch.arange(len(task_RCN), device=task_RCN.device).unsqueeze(-1)
    return task_RCN


def _tasks(stored: BlockPages) -> Tensor:
    """int64 [H, C, columns], on the device; made once."""
    if "tasks" not in stored.derived:
        heads = [_head_tasks(stored, head) for head in range(stored.layout.num_heads)]
        most = max(1, *(len(tasks) for tasks in heads))
        rows = [[*tasks, *[[0] * NUM_COLUMNS] * (most - len(tasks))] for tasks in heads]
        stored.derived["tasks"] = torch.tensor(rows, dtype=torch.int64).to(stored.arena.device)
    found: Tensor = stored.derived["tasks"]
    return found


def _head_tasks(stored: BlockPages, head: int) -> list[list[int]]:
    page_class, skip = stored.layout.page_class, stored.layout.num_sinks
    fields, strides = columns(page_class), slot_strides(page_class)
    found = []
    for extent in stored.pages.extents[head]:
        addresses = [0 if item is None else extent.span.addresses[item.name] for item in fields]
        for begin in range(0, extent.length, _SPLIT):
            slot, length = extent.first * page_class.page_size + begin, min(_SPLIT, extent.length - begin)
            at = [address + slot * stride for address, stride in zip(addresses, strides, strict=True)]
            row = [0, length, *at, 0, 0]
            row[SKIP] = skip
            if length > skip:
                found.append(row)
            skip = 0
    return found
