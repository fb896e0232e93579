"""What happens to evicted slots: they are dropped, merged into kept ones, fitted or offloaded, layer by layer.

H KV heads   N queries   S kept slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.policy.registry import Term, register
from kvfold.score.base import Needs


@dataclass
class Split:
    """One head's unsealed slots (n of them, position order), and which of them are kept."""

    k_ND: Tensor
    v_ND: Tensor
    position_N: Tensor
    keep_N: Tensor  # bool


_BY_QUERY = ("q_HND", "out_HND", "lse_HN", "share_HN")


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
        mine: dict[str, Any] = {name: getattr(self, name)[heads] for name in _BY_QUERY}
        return replace(self, **mine)

    def joined(self, other: CalibrationTargets) -> CalibrationTargets:
        """With the queries of another pass behind these; all of them see every slot."""
        both: dict[str, Any] = {n: torch.cat((getattr(self, n), getattr(other, n)), 1) for n in _BY_QUERY}
        return replace(self, **both)


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


class PagedRecall(NamedTuple):
    """How reads bring offloaded slots back: for each KV head the best `num_pages` pages of up to `page` slots."""

    page: int
    num_pages: int
    unit: Literal["page", "sentence"]  # what else ends a page


class Evicted(Term):
    """Only slots that are not sealed yet can be changed: codes never are."""

    has_bias: ClassVar[bool] = False  # True: slots have log-biases, and `refit` is called once the selection is final

    @property
    def needs(self) -> Needs:
        """What has to be observed for `refit`: last queries, or queries of a replay."""
        return Needs()

    @property
    def recall(self) -> PagedRecall | None:
        """How reads recall what was evicted, which is then offloaded to the host; None: nothing is."""
        return None

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        """Keys and values [n_kept, D] of the kept slots; default: unchanged."""
        return split.k_ND[split.keep_N], split.v_ND[split.keep_N]

    @property
    def folds(self) -> bool:
        """Whether `fold` may change anything."""
        return type(self).fold is not Evicted.fold

    def refit(self, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> list[Refit]:
        """Values and biases with which the kept slots of each head reproduce the targets; default: unchanged."""
        return [Refit(slots.v_SD[slots.num_sealed :], slots.bias_S[slots.num_sealed :]) for slots in heads]


@register("evicted", "drop")
@dataclass(frozen=True)
class Drop(Evicted):
    """Evicted slots are gone; the kept ones stay as they are."""
