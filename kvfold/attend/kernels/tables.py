"""The tables kernels read: for each layer and lane, the tasks that cover a sequence's stored slots.

A *lane* is a place in the batch of a decode step. A *task* is a stretch of at most `split` slots of one head, adjacent
in memory. Splitting by slots, not by heads, gives every processor the same work although heads differ in length. A
lane has room for C tasks in each layer; unused ones have length 0. When the pages of one sequence change, only its lane
is written again.

    L layers   B lanes   C tasks of a lane   H KV heads   E extents   F address columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.kernels.formats import K_CODE, LENGTH, NUM_COLUMNS, QUERY, V_ZERO
from kvfold.core import ModelSpec
from kvfold.pages.layout import PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.table import Ints, SegmentTable, segment_table, slot_strides

_ALIGNMENT = 128  # slots: tasks begin at multiples, so that tiles and groups of slots are whole
_TASKS_PER_PROCESSOR = 4


@dataclass(frozen=True)
class Layout:
    """What lanes of one batch have in common: the page class of each layer."""

    spec: ModelSpec
    classes: tuple[PageClass, ...]
    open_len: int

    @cached_property
    def heads_L(self) -> Ints:
        return np.array([layer.num_kv_heads for layer in self.spec.layers])


@dataclass(frozen=True)
class LaneTasks:
    """Tasks of one sequence, layer by layer and head by head; `layer_N` and `head_N` say whose each is."""

    layer_N: Ints
    head_N: Ints
    length_N: Ints
    address_NF: Ints

    def most(self, num_layers: int) -> int:
        """Tasks of the fullest layer."""
        return int(np.bincount(self.layer_N, minlength=num_layers).max(initial=0))


def stored_tables(sequence: SequenceCache) -> tuple[SegmentTable, ...]:
    """What a lane is made of; the same objects until pages change."""
    return tuple(segment_table(segment) for segment in (*sequence.segments, sequence.tail))


def choose_splits(tables: Sequence[SegmentTable], num_layers: int, num_processors: int) -> Ints:
    """Slots per task of each layer, so that a layer has a few tasks for every processor."""
    slots_L = sum((np.bincount(t.layer_E, t.length_E, num_layers) for t in tables), np.zeros(num_layers))
    even_L = np.ceil(slots_L / (num_processors * _TASKS_PER_PROCESSOR * _ALIGNMENT)).astype(np.int64)
    return np.asarray(np.maximum(even_L, 1) * _ALIGNMENT)


def lane_tasks(tables: Sequence[SegmentTable], layout: Layout, split_L: Ints) -> LaneTasks:
    """Cut every extent into tasks."""
    layer_E, head_E, length_E = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("layer_E", "head_E", "length_E")
    )
    address_EF = np.concatenate([table.address_EF for table in tables])
    order_E = np.lexsort((head_E, layer_E))  # stable: a head's extents stay oldest first
    pieces_E = -(-length_E[order_E] // split_L[layer_E[order_E]])
    of_N = np.repeat(order_E, pieces_E)
    nth_N = np.arange(len(of_N)) - np.repeat(np.cumsum(pieces_E) - pieces_E, pieces_E)
    begin_N = nth_N * split_L[layer_E[of_N]]
    stride_LF = np.array([slot_strides(page_class) for page_class in layout.classes])
    return LaneTasks(
        layer_E[of_N],
        head_E[of_N],
        np.minimum(length_E[of_N] - begin_N, split_L[layer_E[of_N]]),
        address_EF[of_N] + begin_N[:, None] * stride_LF[layer_E[of_N]],
    )


class Tables:
    """Tables of B lanes on the device. `put` notes a lane's tasks, `flush` sends what changed in one copy."""

    def __init__(self, layout: Layout, num_lanes: int, capacity: int, device: torch.device) -> None:
        self.layout, self.num_lanes, self.capacity = layout, num_lanes, capacity
        self.most_heads = int(layout.heads_L.max())
        shape = (layout.spec.num_layers, num_lanes)
        self.task_LBC = torch.zeros(*shape, capacity, NUM_COLUMNS, dtype=torch.int64, device=device)
        self.rows_LBH = torch.zeros(*shape, self.most_heads, 2, dtype=torch.int32, device=device)
        self.num_tasks = torch.tensor([num_lanes * capacity], dtype=torch.int32, device=device)
        self._changed: dict[int, tuple[Ints, NDArray[np.int32]]] = {}

    def put(self, lane: int, tasks: LaneTasks) -> None:
        """Lay out one lane; tasks of a head follow one another, `rows` has the first and the one after the last."""
        num_layers, heads_L = self.layout.spec.num_layers, self.layout.heads_L
        count_L = np.bincount(tasks.layer_N, minlength=num_layers)
        at_N = np.arange(len(tasks.layer_N)) - np.repeat(np.cumsum(count_L) - count_L, count_L)
        task_LC = np.zeros((num_layers, self.capacity, NUM_COLUMNS), dtype=np.int64)
        task_LC[tasks.layer_N, at_N, QUERY] = lane * heads_L[tasks.layer_N] + tasks.head_N
        task_LC[tasks.layer_N, at_N, LENGTH] = tasks.length_N
        task_LC[tasks.layer_N, at_N, K_CODE : V_ZERO + 1] = tasks.address_NF
        per_head_LH = np.zeros((num_layers, self.most_heads), dtype=np.int64)
        np.add.at(per_head_LH, (tasks.layer_N, tasks.head_N), 1)
        end_LH = lane * self.capacity + np.cumsum(per_head_LH, axis=1)
        rows_LH = np.stack((end_LH - per_head_LH, end_LH), axis=-1).astype(np.int32)
        self._changed[lane] = task_LC, rows_LH

    def clear(self, lane: int) -> None:
        """Nothing is stored for this lane."""
        num_layers = self.layout.spec.num_layers
        tasks = np.zeros((num_layers, self.capacity, NUM_COLUMNS), dtype=np.int64)
        self._changed[lane] = tasks, np.zeros((num_layers, self.most_heads, 2), dtype=np.int32)

    def flush(self) -> None:
        if not self._changed:
            return
        device = self.task_LBC.device
        lanes = sent(np.array(list(self._changed)), device)
        tasks, rows = zip(*self._changed.values(), strict=True)
        self.task_LBC.index_copy_(1, lanes, sent(np.stack(tasks, axis=1), device))
        self.rows_LBH.index_copy_(1, lanes, sent(np.stack(rows, axis=1), device))
        self._changed.clear()


def sent(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
