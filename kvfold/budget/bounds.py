"""How few and how many slots a head can keep: its protected ones, and all that exist.

H heads   S slots
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.budget.base import Budget
from kvfold.budget.choose import choose_same
from kvfold.errors import PolicyError


class Bounds(NamedTuple):
    protected_H: Tensor  # int64: slots scored +inf, which must stay
    existing_H: Tensor  # int64: slots scored above -inf


def bounds(score_HS: Tensor) -> Bounds:
    return Bounds((score_HS == torch.inf).sum(-1), (score_HS > -torch.inf).sum(-1))


def floor_slots(floor: float, budget: Budget) -> int:
    """Slots that `floor` of a head's mean budget makes safe; a floor above 0 is at least one slot."""
    return max(1, int(floor * budget.slots_per_head)) if floor > 0 else 0


def with_floor(score_HS: Tensor, floor_len: int) -> Tensor:
    """Scores in which the top `floor_len` slots of each head beat every other slot, though not a protected one."""
    safe_HS = choose_same(score_HS, floor_len) & (score_HS < torch.inf)
    return score_HS.masked_fill(safe_HS, torch.finfo(score_HS.dtype).max)


def check_floor(term: str, floor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise PolicyError(f"{term}(floor={floor}): the floor is a share of the mean budget of a head, from 0 to 1")
