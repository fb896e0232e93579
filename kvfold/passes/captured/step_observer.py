"""Observer state that one captured step updates for scorers, one new token per lane, without a host sync.

Mass: a kernel computes the weights again, given each query's log-sum-exp, over the tasks of stored slots and over the
open block, which is a task of its own. Last queries: the earlier ones move up, the new one comes last. Lanes without a
sequence (`fill` < 0: also while a step is captured) are not updated.

    L layers   B lanes   H KV heads   Q query heads   C tasks of a lane   R open block   D head dim   W window
    X queries of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.attend.kernels.formats import QUERY
from kvfold.passes.captured.block_tables import BlockTables
from kvfold.passes.captured.observers import BatchObservers


class StepObserver:
    """Made at the start of a step; `fill_B`: slots of the open blocks before it."""

    def __init__(
        self, observers: BatchObservers, tables: BlockTables, open_LB2: Tensor, memory: Tensor, fill_B: Tensor
    ) -> None:
        self._observers, self._memory, self._layout, self._tables = observers, memory, observers.layout, tables
        is_used_B = fill_B >= 0
        if observers.layout.mass:
            self._row_LBC = (tables.task_LBC[..., QUERY] // tables.num_shifts).to(torch.int32)
            observers.open_tasks.update(open_LB2, fill_B + 1)
            # Behind the fill stands what drafts that rolled back had received.
            slot_R = torch.arange(observers.layout.open_len, device=fill_B.device)
            is_free_BR = (slot_R >= fill_B.unsqueeze(-1)) & is_used_B.unsqueeze(-1)
            observers.open_LBHR.masked_fill_(is_free_BR.unsqueeze(1), 0.0)
        if observers.layout.window:
            number_B = torch.arange(len(fill_B), device=fill_B.device)
            self._lane_B = number_B.masked_fill(~is_used_B, len(fill_B))
            _move_up(observers.last_LBQWD[:, :-1], is_used_B)

    def queries(self, layer: int, q_QBD: Tensor) -> None:
        """The new queries of a layer, one a lane, as the model gave them."""
        if self._layout.window:
            last_BQD = self._observers.last_LBQWD[layer, :, : q_QBD.shape[0], -1, : q_QBD.shape[2]]
            last_BQD.index_copy_(0, self._lane_B, q_QBD.transpose(0, 1).to(last_BQD.dtype))

    def stored_mass(
        self, layer: int, q_RXD: Tensor, offset_RX: Tensor | None, lse_RX: Tensor, codec: str, groups: int
    ) -> None:
        """What the stored slots of a layer received; queries as they met the keys."""
        if self._layout.mass:
            ops.task_mass(
                q_RXD,
                offset_RX,
                self._memory,
                self._tables.task_LBC[layer].flatten(0, 1),
                self._tables.order(layer),
                lse_RX,
                self._row_LBC[layer].flatten(),
                codec,
                groups,
                self._layout.spec.layers[layer].scale,
                self._observers.mass_LBHS[layer].view(-1),
                has_bias=self._layout.classes[layer].has_bias,
                has_skip=self._tables.num_shifts > 1,
            )

    def open_mass(self, layer: int, q_RXD: Tensor, lse_RX: Tensor, kv_dtype: str) -> None:
        """What the open block received, the new slot in it: after it was stored."""
        if self._layout.mass:
            spec = self._layout.spec.layers[layer]
            task_R, mass = self._observers.open_tasks.of(layer), self._observers.open_LBHR[layer].view(-1)
            row_R = self._observers.open_tasks.row_N[: len(task_R)]
            ops.task_mass(q_RXD, None, self._memory, task_R, None, lse_RX, row_R, kv_dtype, 1, spec.scale, mass)


def _move_up(last_LBQWD: Tensor, is_used_B: Tensor) -> None:
    """Drop the oldest query of the lanes in use."""
    if last_LBQWD.shape[3] > 1:
        is_used = is_used_B.view(-1, 1, 1, 1)
        last_LBQWD[..., :-1, :] = torch.where(is_used, last_LBQWD[..., 1:, :], last_LBQWD[..., :-1, :])
