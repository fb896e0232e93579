"""Ridge regression and its box-constrained form, in fp64, through the smaller of the two Gram matrices.

A has a row for each query and a column for each slot, and either may be the longer:

    (A'A + m I)^-1 A' R  =  A' (A A' + m I)^-1 R

Problems of one shape are solved as a batch. A shorter one is padded with columns of 0, whose solution is 0; `count_B`
is the number of columns that each really has, and m is `strength` times their mean square.

    B problems   N rows   S columns   X right-hand sides
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 4096  # of the longer side, which is summed over: fp64 copies of A stay small
_STEPS = 16  # of projected gradients; they only move what the box has cut
_POWER_STEPS = 8


def ridge(a_BNS: Tensor, target_BNX: Tensor, strength: float, count_B: Tensor) -> Tensor:
    """fp64 [B, S, X]: argmin |A x - target|^2 + m |x|^2."""
    num_rows, num_columns = a_BNS.shape[1:]
    if num_columns <= num_rows:
        gram_BSS, right_BSX = gram(a_BNS.mT), product(a_BNS.mT, target_BNX)
        return _solve(gram_BSS, right_BSX, strength, count_B)
    x_BNX = _solve(gram(a_BNS), target_BNX.double(), strength, count_B)
    return torch.cat([part_BNs.mT.double() @ x_BNX for part_BNs in a_BNS.split(_TILE, dim=2)], dim=1)


def boxed_ridge(a_BNS: Tensor, target_BN: Tensor, strength: float, count_B: Tensor, low: float, high: float) -> Tensor:
    """fp64 [B, S] in [low, high]: argmin |A x - target|^2 + m |x - 1|^2, the ridge solution cut, then steps down."""
    missing_BN1 = (target_BN - a_BNS.sum(-1)).unsqueeze(-1)
    x_BS = 1.0 + ridge(a_BNS, missing_BN1, strength, count_B).squeeze(-1)
    is_cut_B1 = ((x_BS < low) | (x_BS > high)).any(-1, keepdim=True)
    x_BS = x_BS.clamp(low, high)
    if not bool(is_cut_B1.any()):
        return x_BS
    return _descend(a_BNS, target_BN, strength, count_B, x_BS, low, high).where(is_cut_B1, x_BS)


def _descend(
    a_BNS: Tensor, target_BN: Tensor, strength: float, count_B: Tensor, x_BS: Tensor, low: float, high: float
) -> Tensor:
    """Projected gradient steps from x, in the precision of A."""
    penalty_B1 = (strength * a_BNS.square().sum((1, 2)) / count_B).unsqueeze(-1)
    rate_B1 = 1.0 / (_largest_eigenvalue(a_BNS) + penalty_B1)
    step_BS, target_BN = x_BS.to(a_BNS.dtype), target_BN.to(a_BNS.dtype)
    for _ in range(_STEPS):
        gradient_BS = _times(a_BNS.mT, _times(a_BNS, step_BS) - target_BN) + penalty_B1 * (step_BS - 1.0)
        step_BS = (step_BS - rate_B1 * gradient_BS).clamp(low, high)
    return step_BS.to(x_BS.dtype)


def gram(a_BXY: Tensor) -> Tensor:
    """A A' in fp64."""
    shape = (len(a_BXY), a_BXY.shape[1], a_BXY.shape[1])
    total_BXX = torch.zeros(shape, dtype=torch.float64, device=a_BXY.device)
    for part_BXy in a_BXY.split(_TILE, dim=2):
        wide_BXy = part_BXy.double()
        total_BXX.baddbmm_(wide_BXy, wide_BXy.mT)
    return total_BXX


def product(a_BXY: Tensor, b_BYZ: Tensor) -> Tensor:
    """A B in fp64."""
    shape = (len(a_BXY), a_BXY.shape[1], b_BYZ.shape[2])
    total_BXZ = torch.zeros(shape, dtype=torch.float64, device=a_BXY.device)
    for a_BXy, b_ByZ in zip(a_BXY.split(_TILE, dim=2), b_BYZ.split(_TILE, dim=1), strict=True):
        total_BXZ.baddbmm_(a_BXy.double(), b_ByZ.double())
    return total_BXZ


def _solve(gram_BXX: Tensor, right_BXY: Tensor, strength: float, count_B: Tensor) -> Tensor:
    """With m on the diagonal. Both Gram matrices have one trace; where A is 0 anything above 0 keeps the solution 0."""
    diagonal_BX = gram_BXX.diagonal(dim1=1, dim2=2)
    penalty_B = (strength * diagonal_BX.sum(-1) / count_B).clamp(min=1e-12)
    diagonal_BX.add_(penalty_B.unsqueeze(-1))
    return torch.cholesky_solve(right_BXY, torch.linalg.cholesky(gram_BXX))


def _times(a_BXY: Tensor, x_BY: Tensor) -> Tensor:
    return (a_BXY @ x_BY.unsqueeze(-1)).squeeze(-1)


def _largest_eigenvalue(a_BNS: Tensor) -> Tensor:
    """[B, 1] of A'A, from below by power iteration, then a tenth more: steps must not be too long."""
    x_BS = torch.ones_like(a_BNS[:, 0])
    for _ in range(_POWER_STEPS):
        x_BS = _times(a_BNS.mT, _times(a_BNS, x_BS))
        x_BS = x_BS / x_BS.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return 1.1 * _times(a_BNS, x_BS).square().sum(-1, keepdim=True)
