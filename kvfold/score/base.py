"""What is worth keeping? A scorer gives every stored slot of a layer a number; higher means keep.

A scorer is vectorised over rows (R = all (sequence, KV head) pairs of one layer, sequence-major) and never sees the
batch. Rows are padded on the right; `valid_RS` tells which slots exist. Slots stand in order of position. What a
scorer needs to look at is data on its class, and the runner provides exactly that.

    R rows   S slots   D head dim   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.core import LayerSpec


@dataclass(frozen=True)
class Needs:
    """What a scorer looks at besides keys, values and positions.

    last_queries   the last so many post-RoPE queries (0: none); they span chunk borders
    mass           attention mass each slot received from all queries that could see it, and their number
    query_stats    mean and covariance of the pre-RoPE queries
    end_of_prompt  must not be asked before the end of the prompt is there (refused between chunks)
    """

    last_queries: int = 0
    mass: bool = False
    query_stats: bool = False
    end_of_prompt: bool = False


@dataclass
class QueryStats:
    """Moments of the pre-RoPE queries of a row's group, leaving out the first `num_sinks` tokens of the sequence."""

    mean_RGD: Tensor
    cov_RGDD: Tensor


@dataclass
class View:
    """The stored slots of one layer. Optional parts are present exactly when the scorer's `needs` ask for them."""

    layer: int
    num_layers: int
    spec: LayerSpec
    num_heads: int  # rows per sequence: row r belongs to sequence r // num_heads
    k_RSD: Tensor  # post-RoPE, in the model's dtype
    v_RSD: Tensor
    position_RS: Tensor  # int64; padding holds 0
    valid_RS: Tensor  # bool
    seen_R: Tensor  # int64: tokens committed at the end of this call, the logical length
    seed: int = 0
    q_RGWD: Tensor | None = None  # the last W queries; a shorter prompt pads on the left
    q_position_RW: Tensor | None = None  # int64; -1 where padded
    mass_RS: Tensor | None = None  # fp32, summed over the group
    mass_count_RS: Tensor | None = None  # fp32: queries that could see the slot, summed over the group
    stats: QueryStats | None = None

    @property
    def len_R(self) -> Tensor:
        return self.valid_RS.sum(-1)

    def masked(self, score_RS: Tensor) -> Tensor:
        """fp32 scores with -inf where there is no slot."""
        return score_RS.float().masked_fill(~self.valid_RS, -torch.inf)


class Scorer(ABC):
    """One required method; class data says what it needs and whether it evicts at all."""

    keeps_all: bool = False  # `full`: no size, no eviction

    @property
    def needs(self) -> Needs:
        return Needs()

    @abstractmethod
    def score(self, view: View) -> Tensor:
        """Scores [R, S], fp32, higher = keep. +inf: this method always keeps the slot. Padding is ignored."""
