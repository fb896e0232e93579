"""How few and how many slots a head can keep: its protected ones, and all that exist.

H heads   S slots
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.budget.base import Budget
from kvfold.errors import PolicyError


class Bounds(NamedTuple):
    protected_H: Tensor  # int64: slots scored +inf, which must stay
    existing_H: Tensor  # int64: slots scored above -inf


def bounds(score_HS: Tensor) -> Bounds:
    return Bounds((score_HS == torch.inf).sum(-1), (score_HS > -torch.inf).sum(-1))


def floor_slots(floor: float, budget: Budget) -> int:
    """Slots that `floor` of a head's mean budget makes safe; a floor above 0 is at least one slot."""
    return max(1, int(floor * budget.slots_per_head)) if floor > 0 else 0


def check_floor(term: str, floor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise PolicyError(f"{term}(floor={floor}): the floor is a share of the mean budget of a head, from 0 to 1")
