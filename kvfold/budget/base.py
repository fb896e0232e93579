"""Allocators: from scores to the number of slots that each head of each layer keeps.

It works on one sequence: `scores` holds the [H, S] scores of each compressible layer seen so far (padding and missing
slots are -inf, protected slots +inf), `budget` the slots that all compressible layers may keep together. The
top slots per head are selected afterwards, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from kvfold.budget.bounds import Budget
from kvfold.budget.scores import Scores
from kvfold.policy.registry import Term

if TYPE_CHECKING:
    from kvfold.score.base import View


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
