"""Asynchronous load of a stored prefix into the KV pages of a sequence, layer by layer.

The sequence counts the prefix's tokens and has pages for them. A prefill waits for a layer when it attends to it, so
the first layers run while later ones are read and checked; a decode step and a fork wait for all layers. The sequence
can be released at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class AsyncLoad(Protocol):
    """Loads the layers in order; calls `then` when all are loaded."""

    then: Callable[[], None]

    def upto(self, layer: int) -> None:
        """Wait until this layer and those below it are loaded. PrefixLost if one turned out bad."""

    def close(self) -> None:
        """Stop loading; close files and end threads."""
