"""What becomes of the rest? Called once per layer, after the choice and before anything is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass
class Split:
    """One head's unsealed slots (n of them, position order), and which of them stay."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    keep_N: Tensor  # bool


class Evicted(ABC):
    """Only slots that are not sealed yet can take something over: codes never change."""

    changes: ClassVar[bool] = True  # False: `fold` is the identity and need not be called

    @abstractmethod
    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        """Keys and values [n_kept, D] of the slots that stay."""
