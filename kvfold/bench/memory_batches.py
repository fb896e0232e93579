"""Batches by expected memory: a batch that runs out of memory would waste its prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvfold.pages.arena import Arena

_USED = 0.9  # of the free bytes: expected bytes exclude decoded tokens, and come from another prompt
_Item = TypeVar("_Item")


def fitting_batches(items: Sequence[_Item], num_bytes: Callable[[_Item], int], arena: Arena) -> Iterator[list[_Item]]:
    """Consecutive batches of at least one item whose caches are expected to fit into free memory together."""
    room = _USED * arena.free_bytes
    run: list[_Item] = []
    taken = 0
    for item in items:
        if run and taken + num_bytes(item) > room:
            yield run
            run, taken = [], 0
        run.append(item)
        taken += num_bytes(item)
    if run:
        yield run
