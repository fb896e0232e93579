"""Which stored slots does a step read? The choice as a policy names it; the reading itself is done elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.policy.registry import register


class Reader:
    """A choice of the `attend` axis."""


@register("attend", "all")
@dataclass(frozen=True)
class All(Reader):
    """Every stored slot is read at every step."""
