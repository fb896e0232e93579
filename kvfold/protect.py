"""Protection: slots that are never evicted, which are attention sinks, recent tokens and pinned spans.

Seven published policies collapse without a protected border (arXiv:2605.18053), so the default protects one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvfold.policy.registry import Term, register
from kvfold.policy.size import Floor, Percent


@register("protect", "protect")
@dataclass(frozen=True)
class Protect(Term):
    """Keep the first `sinks` and the last `recent` tokens, and pinned spans; `protect(none)` keeps nothing by rule.

    `recent` is a number of tokens or a share, such as 50%, of the slots that the size lets a head keep on average
    beside the open block, rounded down. `h2o + protect(sinks=0, recent=50%)` spends half of the budget on recent slots
    and half on heavy hitters, as H2O does. Sinks are a number: no method has a share of them, and a codec that holds
    them exact has to know how many before it knows the size.
    """

    sinks: int = 4
    recent: int | Percent = 32

    def validate(self) -> str | None:
        if not isinstance(self.recent, Percent):
            return None
        if not 0 < self.recent.percent <= 100:
            return f"recent is a share above 0% and at most 100%, not {self.recent}"
        if self.recent.percent == 100 and self.sinks:
            return f"recent=100% leaves no slot for sinks={self.sinks}; write sinks=0 or a smaller share"
        return None

    def at(self, slots_per_head: int) -> Protect:
        """The same with a number of recent tokens, for a head that keeps so many slots on average."""
        return replace(self, recent=self.recent.of(slots_per_head)) if isinstance(self.recent, Percent) else self

    def floor(self, window: int, open_len: int, *, sinks: int = 0) -> Floor:
        """What must fit into every head, with the first `sinks` and the last `window` slots that a score keeps."""
        sinks = max(self.sinks, sinks)
        if isinstance(self.recent, Percent):
            return Floor(sinks, window, open_len, self.recent)
        return Floor(sinks, max(self.recent, window), open_len)

    def mask(self, position_RS: Tensor, seen_R: Tensor) -> Tensor:
        """bool [R, S]: slots that must stay; a share has to be settled by `at` first."""
        assert isinstance(self.recent, int)
        ago_RS = seen_R.unsqueeze(-1) - 1 - position_RS
        return (position_RS < self.sinks) | (ago_RS < self.recent)
