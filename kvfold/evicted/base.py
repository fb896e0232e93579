"""What happens to evicted slots: they are dropped, merged into kept ones, fitted or offloaded, layer by layer.

H KV heads   N queries   S kept slots   D head dim
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvfold.policy.registry import Term
from kvfold.score.base import Needs


@dataclass
class Split:
    """One head's unsealed slots (n of them, position order), and which of them are kept."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    keep_N: Tensor  # bool


@dataclass(frozen=True)
class CalibrationTargets:
    """Calibration queries, and a layer's outputs to them over the full cache, with log-sum-exps of scaled scores."""

    q_HND: Tensor
    out_HND: Tensor  # in the precision that attention has
    lse_HN: Tensor  # fp32
    share_HN: Tensor  # fp32: the cache's share of each query's attention
    scale: float
    position_N: Tensor | None = None  # where given, a query sees slots up to its own position

    def of(self, heads: list[int]) -> CalibrationTargets:
        """Of some heads."""
        q_HND, out_HND = self.q_HND[heads], self.out_HND[heads]
        lse_HN, share_HN = self.lse_HN[heads], self.share_HN[heads]
        return replace(self, q_HND=q_HND, out_HND=out_HND, lse_HN=lse_HN, share_HN=share_HN)

    def joined(self, other: CalibrationTargets) -> CalibrationTargets:
        """With the queries of another pass behind these; all of them see every slot."""
        q_HND, out_HND = torch.cat((self.q_HND, other.q_HND), 1), torch.cat((self.out_HND, other.out_HND), 1)
        lse_HN, share_HN = torch.cat((self.lse_HN, other.lse_HN), 1), torch.cat((self.share_HN, other.share_HN), 1)
        return replace(self, q_HND=q_HND, out_HND=out_HND, lse_HN=lse_HN, share_HN=share_HN)


@dataclass(frozen=True)
class KeptSlots:
    """One head's kept slots: the first `num_sealed` as they are stored, the others to be encoded."""

    k_SD: Tensor
    v_SD: Tensor
    bias_S: Tensor
    position_S: Tensor
    num_sealed: int = 0


class Refit(NamedTuple):
    """Values and log-biases of the slots to be encoded."""

    v_SD: Tensor
    bias_S: Tensor


class Evicted(Term, ABC):
    """Only slots that are not sealed yet can be changed: codes never are."""

    folds: ClassVar[bool] = True  # False: `fold` is the identity and need not be called
    offloads: ClassVar[bool] = False  # True: evicted slots are offloaded to the host, and reads recall them
    has_bias: ClassVar[bool] = False  # True: slots have log-biases, and `refit` is called once the selection is final

    @property
    def needs(self) -> Needs:
        """What has to be observed for `refit`: last queries, or queries of a replay."""
        return Needs()

    @abstractmethod
    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        """Keys and values [n_kept, D] of the kept slots."""

    def refit(self, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> list[Refit]:
        """Values and biases with which the kept slots of each head reproduce the targets; default: unchanged."""
        return [Refit(slots.v_SD[slots.num_sealed :], slots.bias_S[slots.num_sealed :]) for slots in heads]
