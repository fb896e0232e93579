"""Positions of kept keys.

`keep`: the one it was computed at. `slot`: positions close up over the gaps, counted back from the query, so a stream
never leaves the trained window; queries keep their true position and keys appear shifted (StreamingLLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvfold.policy.registry import Term, register


class Position(Term):
    """A choice of the `position` axis. `shifts`: keys are read at other positions than they were computed at."""

    shifts: ClassVar[bool] = False


@register("position", "keep")
@dataclass(frozen=True)
class Keep(Position):
    """Kept keys stay at their original positions."""


@register(
    "position",
    "slot",
    paper="arXiv:2309.17453",
    cost="one rotation per gap",
    published="as published",
)
@dataclass(frozen=True)
class Slot(Position):
    """Kept keys close up: gaps vanish from the distances a query sees. Needs a fixed-frequency RoPE."""

    shifts: ClassVar[bool] = True
