"""Block tables on the device: for each layer and lane, the split-KV tasks that cover a sequence's stored slots.

A lane has room for C tasks in each layer; unused ones have length 0. When the pages of one sequence change, only its
lane is written again; when its slots became more, only the lengths of the tasks that hold them. Where it pays, the
longest tasks of a layer begin first, so that short ones even out when processors end, and few of the unused ones begin.

    L layers   B lanes   C tasks of a lane   H KV heads   N tasks   P programs of a layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.kernels.formats import BIAS, K_CODE, LENGTH, MASS, NUM_COLUMNS, QUERY, SKIP
from kvfold.core import ModelSpec
from kvfold.pages.async_copy import sent
from kvfold.pages.layout import PageClass
from kvfold.pages.places import COLUMNS, Ints
from kvfold.passes.captured.split_kv import Tasks


@dataclass(frozen=True)
class Layout:
    """What the lanes of one batch share: the page class of each layer, whether keys are shifted to `slot` positions,
    and what scorers observe of decoded tokens (attention mass, the last `window` queries)."""

    spec: ModelSpec
    classes: tuple[PageClass, ...]
    open_len: int
    shifts: bool = False
    mass: bool = False
    window: int = 0
    sink_len: int = 0  # full-precision sinks, where codecs ask for them

    @property
    def observes(self) -> bool:
        return self.mass or self.window > 0

    @cached_property
    def heads_L(self) -> Ints:
        return np.array([layer.num_kv_heads for layer in self.spec.layers])

    @cached_property
    def sinks_L(self) -> Ints:
        """Full-precision sinks of each layer, once a sequence has stored them."""
        asks_L = np.array([max(page_class.k.fp_sinks, page_class.v.fp_sinks) > 0 for page_class in self.classes])
        return np.where(asks_L, self.sink_len, 0)


class BlockTables:
    """Tables of B lanes on the device; nothing here waits for it."""

    def __init__(
        self,
        layout: Layout,
        num_lanes: int,
        capacity: int,
        device: torch.device,
        *,
        num_shifts: int = 1,
        mass_len: int = 0,
        num_programs: int | None = None,
    ) -> None:
        """`num_shifts`: rows of queries for each head; `mass_len`: slots of a head in the table of attention mass;
        `num_programs`: of a layer, if the longest of its tasks are to begin first."""
        self.layout, self.num_lanes, self.capacity = layout, num_lanes, capacity
        self.num_shifts, self.mass_len = num_shifts, mass_len
        self.most_heads = int(layout.heads_L.max())
        shape = (layout.spec.num_layers, num_lanes)
        self.task_LBC = torch.zeros(*shape, capacity, NUM_COLUMNS, dtype=torch.int64, device=device)
        self.rows_LBH = torch.zeros(*shape, self.most_heads, 2, dtype=torch.int32, device=device)
        self._order_LP: Tensor | None = None
        if num_programs is not None:
            self._order_LP = torch.zeros(shape[0], num_programs, dtype=torch.int32, device=device)
        self._used_LB = np.zeros(shape, dtype=np.int64)  # tasks that have slots
        self._is_sorted = True

    def put(self, lanes: Sequence[int], tasks: Tasks) -> Ints:
        """Write these lanes anew; returns the row of each task in the table [L * B * C].

        Tasks of a head follow one another, those of no slots last; `rows_LBH` has the first and the one after the last
        that has slots, counted over all lanes.
        """
        lane_N, layer_N = tasks.lane_N, tasks.layer_N
        at_N = (layer_N * self.num_lanes + lane_N) * self.capacity + tasks.nth_N
        task_N = np.zeros((len(at_N), NUM_COLUMNS), dtype=np.int64)
        row_N = lane_N * self.layout.heads_L[layer_N] + tasks.head_N
        task_N[:, QUERY] = row_N * self.num_shifts + tasks.shift_id_N
        task_N[:, LENGTH], task_N[:, SKIP] = tasks.length_N, tasks.skip_N
        if self.mass_len:
            task_N[:, MASS] = (lane_N * self.most_heads + tasks.head_N) * self.mass_len + tasks.first_N
        task_N[:, K_CODE : BIAS + 1] = tasks.address_NF[:, : len(COLUMNS)]
        self.clear(lanes)
        device = self.task_LBC.device
        self.task_LBC.view(-1, NUM_COLUMNS).index_copy_(0, sent(at_N, device), sent(task_N, device))
        rows_LBH = self._rows(lanes, tasks)
        self.rows_LBH.index_copy_(1, sent(np.array(lanes), device), sent(rows_LBH, device))
        self._used_LB[:, lanes] = (rows_LBH[..., 1] - rows_LBH[..., 0]).sum(-1)
        self._is_sorted = False
        return at_N

    def _rows(self, lanes: Sequence[int], tasks: Tasks) -> NDArray[np.int32]:
        """[L, lanes, H, 2]"""
        place_B = np.zeros(self.num_lanes, dtype=np.int64)
        place_B[lanes] = np.arange(len(lanes))
        shape = (self.layout.spec.num_layers, len(lanes), self.most_heads)
        head_N = np.ravel_multi_index((tasks.layer_N, place_B[tasks.lane_N], tasks.head_N), shape)
        count_LBH = np.bincount(head_N, minlength=int(np.prod(shape))).reshape(shape)
        used_LBH = np.bincount(head_N, tasks.length_N > 0, count_LBH.size).reshape(shape)
        first_LBH = np.array(lanes)[:, None] * self.capacity + np.cumsum(count_LBH, axis=-1) - count_LBH
        return np.stack((first_LBH, first_LBH + used_LBH), axis=-1).astype(np.int32)

    def lengthen(self, at_N: Tensor, by_N: Tensor) -> None:
        """Tasks in these rows have so many slots more."""
        self.task_LBC.view(-1, NUM_COLUMNS)[:, LENGTH].index_add_(0, at_N, by_N)

    def begin(self, layer_N: Ints, lane_N: Ints, head_N: Ints) -> None:
        """The next task of each of these heads has slots now."""
        np.add.at(self._used_LB, (layer_N, lane_N), 1)
        self._is_sorted = False
        head_N = (layer_N * self.num_lanes + lane_N) * self.most_heads + head_N
        last_N = self.rows_LBH.view(-1, 2)[:, 1]
        last_N.index_add_(0, sent(head_N, last_N.device), last_N.new_ones(len(head_N)))

    def clear(self, lanes: Sequence[int]) -> None:
        """Empty these lanes."""
        lane_N = sent(np.array(lanes), self.task_LBC.device)
        self.task_LBC.index_fill_(1, lane_N, 0)
        self.rows_LBH.index_fill_(1, lane_N, 0)
        self._used_LB[:, lanes] = 0

    def sort(self) -> bool:
        """Order tasks by length where other ones have slots than before; False if they are more than programs."""
        if self._order_LP is None or self._is_sorted:
            return True
        num_programs = self._order_LP.shape[1]
        order_LN = self.task_LBC[..., LENGTH].flatten(1).argsort(dim=1, descending=True)
        self._order_LP.copy_(order_LN[:, :num_programs])
        self._is_sorted = int(self._used_LB.sum(1).max()) <= num_programs
        return self._is_sorted

    def order(self, layer: int) -> Tensor | None:
        """The tasks of a layer that begin, first to last; None: all, as they lie."""
        return None if self._order_LP is None else self._order_LP[layer]
