"""`adaptive`: as few slots as lose no more than an allowed share of attention, by prompt.

What attention loses when slots go is known before they go: the weights its last queries give them. A head that looks at
its sinks and its neighbours loses nothing with a few dozen slots; one that reads the whole prompt needs most of it.
What later questions will look at, the end of a prompt does not tell; a second reading does, and its weights are scores.

    H heads   S slots   G query heads per KV head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvfold.budget.base import Budget, ModelAllocator, Scores
from kvfold.budget.select import count_top
from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.attention import window_sum

if TYPE_CHECKING:
    from kvfold.score.base import View


@register("budget", "adaptive", revision=2, cost="w·L·d + sort n·H·L")
@dataclass(frozen=True)
class Adaptive(ModelAllocator):
    """As few slots as lose no head more than `loss` of its attention; a size, if there is one, is the upper bound.

    With `window=none` the scores say what is lost: every slot that has more than `loss` stays, in whichever head, and
    of more than the size allows the best. This is for scores that are shares of attention. Under
    `kvzip + adaptive(window=none)` no query of the second reading gave a slot that goes more than `loss` of its
    attention: a text that repeats itself leaves few slots, one of names and numbers many. (KVzap, arXiv:2601.07891,
    thresholds predicted scores so.)

    With a window, a head's attention is the mean of what the last `window` queries of its group give each slot, a sum
    of 1. In the order of the scores, the m-th slot stays if the slots from it on hold more than `loss`: then, and only
    then, would ending before it lose too much. Where all of these are more than the size allows, those stay whose loss
    would be largest, over all heads and layers: the size is spent so that the largest loss of a head is as small as can
    be. Protected slots always stay. The price of a slot does not depend on other layers, so a stream is exact, as
    `global`.

    Any score gives the order then; the loss is measured on attention for all of them, since scores (norms, cosines,
    pooled or maximal weights) add up to nothing that could be compared. It is a bound on what the window's queries
    lose, and a prediction for those to come.
    """

    may_leave: ClassVar[bool] = True
    loss: float = 0.02
    window: int | None = 32

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise PolicyError(
                f"adaptive(loss={self.loss}): the loss is a share of a head's attention, from 0 to below 1"
            )
        if self.window is not None and self.window < 1:
            raise PolicyError(f"adaptive(window={self.window}): attention is that of the last queries, 1 or more")

    @property
    def last_queries(self) -> int:
        return self.window or 0

    def weigh(self, score_HS: Tensor, view: View) -> Tensor:
        """For each slot, best first, the attention that goes if neither it nor any after it stays."""
        assert view.q_RGWD is not None and view.q_position_RW is not None
        sum_HGS = window_sum(view, view.q_RGWD, view.q_position_RW)
        return lost_from(score_HS, sum_HGS.mean(1) / view.q_RGWD.shape[2])

    def allocate(self, scores: Sequence[Scores], budget: Budget, layer: int) -> list[Tensor]:
        total = budget.num_layers * len(scores[0].score_HS) * budget.slots_per_head
        return count_top([s.score_HS.where(s.score_HS > self.loss, -torch.inf) for s in scores], total)


def lost_from(score_HS: Tensor, attention_HS: Tensor) -> Tensor:
    """Sums of attention from each slot on, in the order of the scores; +inf and -inf stay what they are."""
    best = score_HS.sort(dim=-1, descending=True, stable=True)
    lost_HS = attention_HS.gather(-1, best.indices).flip(-1).cumsum(-1).flip(-1)
    return lost_HS.where(best.values.isfinite(), best.values)
