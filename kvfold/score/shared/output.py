"""Norm of a value after attention's output projection: how much it adds to the hidden state if attended to.

Values of equal norm differ in what attention's output projection makes of them (CriticalKV, arXiv:2502.03805), and a
value passes through one part of it for every query head of its group.

    R rows   H KV heads   S slots   D head dim   G query heads per KV head   M hidden dims
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.score.base import View
from kvfold.score.shared.attention import MAX_ENTRIES
from kvfold.score.shared.checks import given


def output_norms(term: str, view: View, order: int) -> Tensor:
    """fp32 [R, G, S]: the L1 or L2 norm of v W_o for every query head; 0 where there is no slot."""
    wo_HGDM = given(term, view.wo_HGDM, "wo_HGDM")
    v_RSD = view.v_RSD.masked_fill(~view.valid_RS.unsqueeze(-1), 0.0)
    rows = [_row_norms(v_SD, wo_HGDM[row % view.num_heads], order) for row, v_SD in enumerate(v_RSD)]
    return torch.stack(rows)


def _row_norms(v_SD: Tensor, wo_GDM: Tensor, order: int) -> Tensor:
    """[G, S], some slots at a time: what they add to the hidden state never stands whole."""
    dtype = torch.promote_types(v_SD.dtype, wo_GDM.dtype)
    if dtype != torch.float32 and not v_SD.is_cuda:
        dtype = torch.float32  # few CPUs have 16-bit arithmetic
    num_groups, _, num_dims = wo_GDM.shape
    tiles = v_SD.to(dtype).split(max(1, MAX_ENTRIES // (num_groups * num_dims)))
    wo_GDM = wo_GDM.to(dtype)
    return torch.cat([torch.linalg.vector_norm(tile @ wo_GDM, order, -1, dtype=torch.float32) for tile in tiles], 1)
