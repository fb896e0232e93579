"""Split-KV tasks for open blocks: slots in the cache's own dtype, read by the same kernels as pages.

L layers   B lanes   H KV heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.attend.kernels.formats import K_CODE, LENGTH, MASS, NUM_COLUMNS, QUERY
from kvfold.passes.captured.block_tables import Layout


class OpenTasks:
    """One task for each head of each lane; keys only. MASS counts through a table [B, H, open_len] of every layer."""

    def __init__(self, layout: Layout, num_lanes: int, device: torch.device) -> None:
        self._heads = layout.heads_L.tolist()
        most, lane_B1 = max(self._heads), torch.arange(num_lanes, device=device).unsqueeze(-1)
        head_H = torch.arange(most, device=device)
        shape = (len(self._heads), num_lanes, most, NUM_COLUMNS)
        self._task_LBH = torch.zeros(shape, dtype=torch.int64, device=device)
        self._task_LBH[..., MASS] = (lane_B1 * most + head_H) * layout.open_len
        self._task_LBH[..., QUERY] = lane_B1 * torch.tensor(self._heads, device=device).view(-1, 1, 1) + head_H
        sizes = [layout.open_len * layer.head_dim * layout.spec.kv_dtype.itemsize for layer in layout.spec.layers]
        self._byte_L1H = torch.tensor(sizes, device=device).view(-1, 1, 1) * head_H
        self.row_N = torch.arange(num_lanes * most, dtype=torch.int32, device=device)

    def update(self, open_LB2: Tensor, length_B: Tensor) -> None:
        """Where the open blocks lie and how many of their slots count; 0 in lanes without a sequence."""
        self._task_LBH[..., K_CODE] = open_LB2[..., :1] + self._byte_L1H
        self._task_LBH[..., LENGTH] = length_B.unsqueeze(-1)

    def of(self, layer: int) -> Tensor:
        """[B * H, columns]"""
        return self._task_LBH[layer, :, : self._heads[layer]].flatten(0, 1).contiguous()
