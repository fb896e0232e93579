"""The scores of one layer with their ranks and bounds, computed once and shared by several policies.

H heads   S slots
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.budget.bounds import Bounds, bounds
from kvfold.budget.select import ranks


@dataclass(eq=False)
class Scores:
    score_HS: Tensor  # -inf: there is no slot, +inf: protected

    @cached_property
    def rank_HS(self) -> Tensor:
        return ranks(self.score_HS)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds(self.score_HS)

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
        low_H, high_H = self.bounds
        level_S1 = torch.arange(self.score_HS.shape[1], device=low_H.device).unsqueeze(-1)
        takes_SH = (level_S1 >= low_H) & (level_S1 < high_H)
        kept_SH = takes_SH.flatten().cumsum(0).view(takes_SH.shape) + low_H.sum()
        return kept_SH.masked_fill(~takes_SH, torch.iinfo(kept_SH.dtype).max)
