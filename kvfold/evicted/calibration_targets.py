"""Calibration targets of `fit(prompt)`: a layer's outputs to the prompt's last queries over the full cache.

In tiles of queries, so that no more than a few hundred megabytes of scores exist at once.

    H KV heads   G query heads per KV head   T query tokens   N = G * T   S slots   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.evicted.base import CalibrationTargets
from kvfold.score.base import View

MOST_SCORES = 1 << 25  # at once, 128 MiB


def targets_of(view: View, q_HGTD: Tensor, position_T: Tensor) -> CalibrationTargets:
    """Every head's outputs to queries that see slots up to their own position."""
    position_N = position_T.repeat(q_HGTD.shape[1])
    q_HND, hidden_HS = q_HGTD.flatten(1, 2), ~view.valid_RS
    k_HSD, v_HSD = (x_HSD.masked_fill(hidden_HS.unsqueeze(-1), 0.0).float() for x_HSD in (view.k_RSD, view.v_RSD))
    bias_HS = torch.zeros_like(hidden_HS, dtype=torch.float32) if view.bias_RS is None else view.bias_RS
    bias_HS = bias_HS.masked_fill(hidden_HS, -torch.inf)
    step = max(1, MOST_SCORES // max(hidden_HS.numel(), 1))
    parts = []
    for q_HnD, position_n in zip(q_HND.split(step, dim=1), position_N.split(step), strict=True):
        score_HnS = scores(q_HnD, k_HSD, bias_HS, view.spec.scale, position_n, view.position_RS)
        lse_Hn = score_HnS.logsumexp(-1)
        parts.append((score_HnS.sub_(lse_Hn.unsqueeze(-1)).exp_() @ v_HSD, lse_Hn))
    out_HND, lse_HN = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    return CalibrationTargets(q_HND, out_HND, lse_HN, torch.ones_like(lse_HN), view.spec.scale, position_N)


def scores(
    q_HND: Tensor, k_HSD: Tensor, bias_HS: Tensor, scale: float, position_N: Tensor | None, position_HS: Tensor
) -> Tensor:
    """Scaled scores with biases, fp32 [H, N, S]; -inf where a query does not see a slot."""
    score_HNS = (q_HND.float() @ k_HSD.float().mT).mul_(scale).add_(bias_HS.unsqueeze(1))
    if position_N is not None:
        score_HNS.masked_fill_(position_HS.unsqueeze(1) > position_N.unsqueeze(-1), -torch.inf)
    return score_HNS
