"""Baselines: the beginning of a text, its end, both without the middle, or sentences at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Floats, Selector, Task


@register("selector", "head")
@dataclass(frozen=True)
class Head(Selector):
    """The beginning of the text."""

    skips: ClassVar[bool] = False

    def worth(self, task: Task) -> Floats:
        return -np.arange(len(task.units), dtype=np.float64)


@register("selector", "tail")
@dataclass(frozen=True)
class Tail(Selector):
    """The end of the text."""

    skips: ClassVar[bool] = False

    def worth(self, task: Task) -> Floats:
        return np.arange(len(task.units), dtype=np.float64)


@register("selector", "ends")
@dataclass(frozen=True)
class Ends(Selector):
    """Beginning and end, without the middle, as LongBench truncates."""

    skips: ClassVar[bool] = False

    def worth(self, task: Task) -> Floats:
        place = np.arange(len(task.units), dtype=np.float64)
        return np.maximum(-place, place - len(place) + 0.5)


@register("selector", "shuffle")
@dataclass(frozen=True)
class Shuffle(Selector):
    """Units at random, in the order of the text."""

    seed: int = 0

    def worth(self, task: Task) -> Floats:
        return np.random.default_rng(self.seed).permutation(len(task.units)).astype(np.float64)
