"""What a policy does in one phase, prefill or decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfold.policy.registry import Term

if TYPE_CHECKING:
    from kvfold.budget.base import Allocator
    from kvfold.evicted.base import Evicted
    from kvfold.policy.size import Size
    from kvfold.protect import Protect
    from kvfold.score.base import Scorer
    from kvfold.triggers import Trigger

STAGE_AXES = ("score", "budget", "size", "when", "protect", "evicted")


@dataclass(frozen=True)
class Stage:
    """The choices of one phase, a field per axis; without a size nothing is evicted and the score is `full`."""

    score: Scorer
    budget: Allocator
    size: Size | None
    when: Trigger
    protect: Protect
    evicted: Evicted

    @property
    def evicts(self) -> bool:
        return self.size is not None

    @property
    def may_evict(self) -> bool:
        """Whether a trigger can fire."""
        return self.evicts and self.when.can_fire

    @property
    def holds_bytes(self) -> bool:
        """Whether triggers are to hold a number of bytes."""
        return self.may_evict and self.size is not None and self.size.counts_bytes

    @property
    def observes_mass(self) -> bool:
        """Whether attention mass is kept for each slot."""
        return self.evicts and self.score.needs.mass

    @property
    def variants(self) -> tuple[Term, ...]:
        """The registered parts: everything but the size."""
        return self.score, self.budget, self.when, self.protect, self.evicted
