"""Allocators: from scores to the number of slots that each head of each layer keeps.

It works on one sequence: `scores` holds the [H, S] scores of each compressible layer seen so far (padding and missing
slots are -inf, protected slots +inf), `budget` the slots that all compressible layers may keep together. The
top slots per head are selected afterwards, once.

    H heads   S slots
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.budget.select import ranks
from kvfold.errors import PolicyError
from kvfold.policy.registry import Term

if TYPE_CHECKING:
    from kvfold.score.base import View


@dataclass(frozen=True)
class Budget:
    """Slots per head on average, over `num_layers` compressible layers (of which some may not be scored yet)."""

    slots_per_head: int
    num_layers: int
    num_tokens: int = 0  # of the sequence once this call has ended, whatever a layer holds of them; 0: not known


class Bounds(NamedTuple):
    protected_H: Tensor  # int64: slots scored +inf, which must stay
    existing_H: Tensor  # int64: slots scored above -inf


def floor_slots(floor: float, budget: Budget) -> int:
    """Slots that `floor` of a head's mean budget makes safe; a floor above 0 is at least one slot."""
    return max(1, int(floor * budget.slots_per_head)) if floor > 0 else 0


def check_floor(term: str, floor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise PolicyError(f"{term}(floor={floor}): the floor is a share of the mean budget of a head, from 0 to 1")


@dataclass(eq=False)
class Scores:
    """Of the slots of a layer; of several sequences, in front of whose heads an axis B stands, all is done for each."""

    score_HS: Tensor  # -inf: there is no slot, +inf: protected

    @cached_property
    def rank_HS(self) -> Tensor:
        return ranks(self.score_HS)

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds((self.score_HS == torch.inf).sum(-1), (self.score_HS > -torch.inf).sum(-1))

    @cached_property
    def exists_HS(self) -> Tensor:
        return self.score_HS != -torch.inf

    def select(self, count_H: Tensor) -> Tensor:
        """bool [H, S]: the count_H[h] highest scores of each head."""
        return self.rank_HS < count_H.unsqueeze(-1)

    def with_floor(self, floor_len: int) -> Tensor:
        """Scores in which the top `floor_len` slots of each head beat every other slot, though not a protected one."""
        if floor_len == 0:
            return self.score_HS
        return self.score_HS.masked_fill(self._free_rank_HS < floor_len, torch.finfo(self.score_HS.dtype).max)

    @cached_property
    def _free_rank_HS(self) -> Tensor:
        """Ranks, without those of protected slots."""
        return self.rank_HS.masked_fill(self.score_HS == torch.inf, torch.iinfo(self.rank_HS.dtype).max)

    @cached_property
    def kept_SH(self) -> Tensor:
        """How many slots a layer keeps when head h takes its s-th, if protected slots come first and then the heads,
        in order, one slot each and again; beyond all counts where it takes none."""
        low_1H, high_1H = (bound_H.unsqueeze(-2) for bound_H in self.bounds)
        level_S1 = torch.arange(self.score_HS.shape[-1], device=low_1H.device).unsqueeze(-1)
        takes_SH = (level_S1 >= low_1H) & (level_S1 < high_1H)
        kept_SH = takes_SH.flatten(-2).cumsum(-1).view(takes_SH.shape) + low_1H.sum(-1, keepdim=True)
        return kept_SH.masked_fill(~takes_SH, torch.iinfo(kept_SH.dtype).max)


class Allocator(Term, ABC):
    """`scope` "layer": `scores` is a list of the one layer in question, whose index among the compressible layers is
    `layer`. `scope` "model": `scores` are all layers up to and with `layer`; counts of earlier layers may only shrink
    from call to call, which is what lets the runner drop slots while it streams through the layers.

    With `may_leave`, an allocator may keep fewer slots than the budget has: the size is then an upper bound, and a
    policy without one means 1x. One that `is_even` lets every head keep equally many. One of scope "layer" gives every
    layer equally many, unless it `slopes`."""

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    may_leave: ClassVar[bool] = False
    is_even: ClassVar[bool] = False
    slopes: ClassVar[bool] = False

    @property
    def last_queries(self) -> int:
        """How many of the last queries `weigh` looks at; 0: it is not called, and `allocate` is given scores."""
        return 0

    def weigh(self, score_HS: Tensor, view: View) -> Tensor:
        """What `allocate` is given of a layer in place of its scores: as many -inf and +inf in each head."""
        return score_HS

    @abstractmethod
    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        """Slots to keep, int64 [H] for each layer of `scores`; never more than the slots that exist (score > -inf),
        never fewer than the protected ones (+inf) of that head."""


class ModelAllocator(Allocator):
    """Shares slots out over all layers."""

    scope: ClassVar[Literal["layer", "model"]] = "model"
