"""What is never dropped? The first tokens (attention sinks), the latest ones, and pinned spans.

Seven published policies collapse without a protected border (arXiv:2605.18053), so the default protects one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.policy.registry import register


@register("protect", "protect")
@dataclass(frozen=True)
class Protect:
    """Keep the first `sinks` and the last `recent` tokens, and pinned spans; `protect(none)` keeps nothing by rule."""

    sinks: int = 4
    recent: int = 32

    def mask(self, position_RS: Tensor, seen_R: Tensor) -> Tensor:
        """bool [R, S]: slots that must stay."""
        ago_RS = seen_R.unsqueeze(-1) - 1 - position_RS
        return (position_RS < self.sinks) | (ago_RS < self.recent)

    @property
    def num_slots(self) -> int:
        return self.sinks + self.recent
