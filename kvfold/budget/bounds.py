"""The budget of a sequence, and the bounds of a head: it keeps at least its protected slots, at most all that exist.

H heads   S slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.errors import PolicyError


@dataclass(frozen=True)
class Budget:
    """Slots per head on average, over `num_layers` compressible layers (of which some may not be scored yet)."""

    slots_per_head: int
    num_layers: int
    num_tokens: int = 0  # of the sequence once this call has ended, whatever a layer holds of them; 0: not known


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
