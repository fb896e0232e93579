"""Slots of a sequence that are still on their way to its pages, layer by layer.

The sequence counts their tokens as its own, and has the memory for them. A pass that reads on waits for a layer where
it attends to that layer, so the first ones run while later ones are fetched and checked; a decode step and a fork wait
for all of them. It can be released at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class AsyncLoad(Protocol):
    """Whoever fetches them; calls `then` when all are there."""

    then: Callable[[], None]

    def upto(self, layer: int) -> None:
        """Wait until this layer and those below it are there. PrefixLost if one turned out bad."""

    def close(self) -> None:
        """No more will come: let go of files and threads."""
