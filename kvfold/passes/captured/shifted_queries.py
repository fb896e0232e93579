"""Queries rotated for `slot` positions: one copy of a head's queries for each position shift of its stored keys.

A lane has room for V shifts in each head, so a CUDA graph stays valid while they change. Unused shifts are 0.

    L layers   B lanes   H KV heads   V shifts   F frequencies   R rows, lane by lane and head by head
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.attend.kernels import ops
from kvfold.core import Rope
from kvfold.pages.async_copy import sent
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.block_tables import Layout
from kvfold.passes.captured.position_shifts import shifts_of
from kvfold.passes.captured.split_kv import LaneTables

_FEWEST = 2  # sinks and a window


class ShiftedQueries:
    """Shifts of B lanes on the device, with as much room as these sequences need."""

    def __init__(self, layout: Layout, sequences: Sequence[SequenceCache], num_lanes: int) -> None:
        most = max(shifts.most for sequence in sequences if (shifts := shifts_of(sequence)) is not None)
        self.num_shifts = 1 << (max(most, _FEWEST) - 1).bit_length()
        device = sequences[0].arena.device
        ropes = [layer.rope for layer in layout.spec.layers]
        self._period = {rope: rope.inverse_periods(device) for rope in set(ropes) if rope is not None}
        self._ropes, self._heads = ropes, layout.heads_L.tolist()
        self._shift_L = [
            torch.zeros(num_lanes, heads, self.num_shifts, dtype=torch.int32, device=device) for heads in self._heads
        ]

    def put(self, parts: Sequence[LaneTables]) -> bool:
        """Write the shifts of these lanes; False if one of them has too many."""
        shifts = [part.shifts for part in parts if part.shifts is not None]
        if max(item.most for item in shifts) > self.num_shifts:
            return False
        shift_BXV = np.stack([item.table(self.num_shifts) for item in shifts]).astype(np.int32)
        lane_B = sent(np.array([part.lane for part in parts]), self._shift_L[0].device)
        shift_L = sent(shift_BXV, lane_B.device).split(self._heads, dim=1)
        for mine_BHV, now_BHV in zip(self._shift_L, shift_L, strict=True):
            mine_BHV.index_copy_(0, lane_B, now_BHV)
        return True

    def queries(self, layer: int, q_RXD: Tensor) -> Tensor:
        """[R * V, X, D]: the queries of each row, rotated back by each of its shifts."""
        rope = self._ropes[layer]
        assert isinstance(rope, Rope)  # checked when the session was made
        shift_RV = self._shift_L[layer].flatten(0, 1)
        found: Tensor = ops.rotated_query(q_RXD, shift_RV, self._period[rope], rope.interleaved)
        return found
