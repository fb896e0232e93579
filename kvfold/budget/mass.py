"""Scores as shares of a sum, for allocators that weigh layers or heads.

Attention is never negative and sums to something; norms and cosines (knorm, keydiff) may lie below 0. Those are shifted
up by the lowest score of their layer, so that the order of slots and the gaps between them stay.

    H heads   S slots
"""

from __future__ import annotations

import torch
from torch import Tensor


def mass(score_HS: Tensor) -> Tensor:
    """The scores of one layer, none below 0; protected (+inf) and missing (-inf) slots weigh nothing."""
    finite_HS = score_HS.isfinite()
    known_HS = score_HS.where(finite_HS, 0.0)
    return (known_HS - known_HS.amin().clamp(max=0.0)).where(finite_HS, 0.0)


def ranked(weight_HS: Tensor, score_HS: Tensor) -> Tensor:
    """What buying one more slot of a head is worth, slot by slot: weights of the candidates in their given order, then
    -inf for those that do not exist and, last, +inf for those that must stay."""
    protected_H1 = (score_HS == torch.inf).sum(-1, keepdim=True)
    candidates_H1 = score_HS.isfinite().sum(-1, keepdim=True)
    slot_S = torch.arange(score_HS.shape[-1], device=score_HS.device)
    price_HS = weight_HS.masked_fill(slot_S >= candidates_H1, -torch.inf)
    return price_HS.masked_fill(slot_S >= score_HS.shape[-1] - protected_H1, torch.inf)
