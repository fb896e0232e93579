"""Column maxima of the attention map: the largest weight of each slot, from tiles, given every query's log-sum-exp.

R rows   G query heads per KV head   T queries   S slots   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core import HAS_TRITON
from kvfold.score.shared.attention import MAX_ENTRIES, dots


def column_max(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """fp32 [R, G, S]: the maximum over the queries of exp(q.k * scale - lse)."""
    if q_RGTD.is_cuda and HAS_TRITON:
        from kvfold.score.kernels.columns import can_take, fused_column_max

        if can_take(q_RGTD, k_RSD):
            return fused_column_max(q_RGTD, k_RSD, lse_RGT, scale)
    return column_max_reference(q_RGTD, k_RSD, lse_RGT, scale)


def column_max_reference(q_RGTD: Tensor, k_RSD: Tensor, lse_RGT: Tensor, scale: float) -> Tensor:
    """The same in plain operations, some queries at a time."""
    num_rows, num_groups, num_queries, _ = q_RGTD.shape
    num_slots = k_RSD.shape[1]
    step = max(1, MAX_ENTRIES // max(num_rows * num_groups * num_slots, 1))
    found_RGS = torch.full((num_rows, num_groups, num_slots), -torch.inf, device=q_RGTD.device)
    for begin in range(0, num_queries, step):
        tile = slice(begin, begin + step)
        logit_RGTS = dots(q_RGTD[:, :, tile], k_RSD).mul_(scale).sub_(lse_RGT[:, :, tile].unsqueeze(-1))
        found_RGS = torch.maximum(found_RGS, logit_RGTS.amax(2))
    return found_RGS.exp_()
