"""`drop`: evicted slots are discarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.evicted.base import Evicted, Split
from kvfold.policy.registry import register


@register("evicted", "drop")
@dataclass(frozen=True)
class Drop(Evicted):
    """Evicted slots are gone; the kept ones stay as they are."""

    folds: ClassVar[bool] = False

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        return split.k_ND[split.keep_N], split.v_ND[split.keep_N]
