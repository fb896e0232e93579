"""Ridge regression and its box-constrained form, in fp64, through the smaller of the two Gram matrices.

A has a row for each query and a column for each slot, and either may be the longer:

    (A'A + m I)^-1 A' R  =  A' (A A' + m I)^-1 R

    N rows   S columns   X right-hand sides
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 4096  # of the longer side, which is summed over: fp64 copies of A stay small
_STEPS = 16  # of projected gradients; they only move what the box has cut
_POWER_STEPS = 8


def ridge(a_NS: Tensor, target_NX: Tensor, strength: float) -> Tensor:
    """fp64 [S, X]: argmin |A x - target|^2 + m |x|^2, with m `strength` times the mean square of A's columns."""
    num_rows, num_columns = a_NS.shape
    if num_columns <= num_rows:
        gram_SS, right_SX = _gram(a_NS.mT), _product(a_NS.mT, target_NX)
        return _solve(gram_SS, right_SX, _penalty(gram_SS, num_columns, strength))
    gram_NN = _gram(a_NS)
    x_NX = _solve(gram_NN, target_NX.double(), _penalty(gram_NN, num_columns, strength))
    return torch.cat([part_Ns.mT.double() @ x_NX for part_Ns in a_NS.split(_TILE, dim=1)])


def boxed_ridge(a_NS: Tensor, target_N: Tensor, strength: float, low: float, high: float) -> Tensor:
    """[S] in [low, high]: argmin |A x - target|^2 + m |x - 1|^2, the ridge solution cut, then gradient steps."""
    penalty = strength * float(a_NS.square().sum()) / a_NS.shape[1]
    x_S = 1.0 + ridge(a_NS, (target_N - a_NS.sum(-1)).unsqueeze(-1), strength).squeeze(-1)
    is_cut = bool(((x_S < low) | (x_S > high)).any())
    x_S = x_S.clamp(low, high)
    if not is_cut:
        return x_S
    x_S, target_N = x_S.to(a_NS.dtype), target_N.to(a_NS.dtype)
    rate = 1.0 / (_largest_eigenvalue(a_NS) + penalty)
    for _ in range(_STEPS):
        gradient_S = a_NS.mT @ (a_NS @ x_S - target_N) + penalty * (x_S - 1.0)
        x_S = (x_S - rate * gradient_S).clamp(low, high)
    return x_S


def _gram(a_XY: Tensor) -> Tensor:
    """A A' in fp64."""
    total_XX = torch.zeros(a_XY.shape[0], a_XY.shape[0], dtype=torch.float64, device=a_XY.device)
    for part in a_XY.split(_TILE, dim=1):
        wide = part.double()
        total_XX.addmm_(wide, wide.mT)
    return total_XX


def _product(a_XY: Tensor, b_YZ: Tensor) -> Tensor:
    """A B in fp64."""
    total_XZ = torch.zeros(a_XY.shape[0], b_YZ.shape[1], dtype=torch.float64, device=a_XY.device)
    for a_Xy, b_yZ in zip(a_XY.split(_TILE, dim=1), b_YZ.split(_TILE), strict=True):
        total_XZ.addmm_(a_Xy.double(), b_yZ.double())
    return total_XZ


def _penalty(gram: Tensor, num_columns: int, strength: float) -> Tensor:
    """Both Gram matrices have one trace. Where A is 0 anything above 0 keeps the solution at 0."""
    return (strength * gram.trace() / num_columns).clamp(min=1e-12)


def _solve(gram: Tensor, right: Tensor, penalty: Tensor) -> Tensor:
    gram.diagonal().add_(penalty)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram))


def _largest_eigenvalue(a_NS: Tensor) -> float:
    """Of A'A, from below by power iteration, then a tenth more: steps must not be too long."""
    x_S = torch.ones_like(a_NS[0])
    for _ in range(_POWER_STEPS):
        x_S = a_NS.mT @ (a_NS @ x_S)
        x_S = x_S / x_S.norm().clamp(min=1e-30)
    return 1.1 * float((a_NS @ x_S).square().sum())
