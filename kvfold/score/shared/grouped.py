"""Base of `chunk` and `sentence`: each slot gets the mean of another score over its group.

R rows   S slots   B sequences   C groups of a sequence
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import term_of
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.checks import at_least


class Grouped(Scorer):
    """score = mean of the inner score over the slots of the group, with `shared` over all heads of the sequence.

    What the inner score always keeps (+inf) stays so by itself and takes no part in the means. A variant says which
    group each slot is in, and adds up over groups.
    """

    scorer: Scorer
    shared: bool
    reuse: int

    def check_inner(self, name: str) -> None:
        """PolicyError if the inner score cannot stand inside another."""
        at_least(name, "reuse", self.reuse, 1)
        inner = term_of(self.scorer).name
        if self.scorer.keeps_all:
            raise PolicyError(f"{name}({inner}): the inner score keeps everything; name one that evicts")
        if self.scorer.reuse_layers > 1:
            raise PolicyError(
                f"{name}({inner}): reuse has no effect inside another score; write it on the outer {name}"
            )

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    @property
    def reuse_layers(self) -> int:
        return self.reuse

    @property
    def default_prefill_trigger(self) -> str:
        return self.scorer.default_prefill_trigger

    @abstractmethod
    def group_RS(self, view: View) -> Tensor:
        """The group of each slot, counted from 0 in its sequence."""

    @abstractmethod
    def sums_RC(self, x_RS: Tensor, view: View) -> Tensor:
        """Sums over the slots of each group; padding holds 0."""

    def score(self, view: View) -> Tensor:
        score_RS = view.masked(self.scorer.score(view))
        free_RS = score_RS.isfinite()
        total_RC = self._shared(self.sums_RC(score_RS.masked_fill(~free_RS, 0.0), view), view)
        count_RC = self._shared(self.sums_RC(free_RS.float(), view), view)
        mean_RS = (total_RC / count_RC.clamp(min=1)).gather(1, self.group_RS(view))
        return view.masked(torch.where(free_RS, mean_RS.float(), score_RS))

    def _shared(self, x_RC: Tensor, view: View) -> Tensor:
        if not self.shared:
            return x_RC
        x_BC = x_RC.view(-1, view.num_heads, x_RC.shape[1]).sum(1)
        return x_BC.repeat_interleave(view.num_heads, dim=0)
