"""How many caches are filled in one pass: what does not fit would cost the pass that finds it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvfold.pages.arena import Arena

_USED = 0.9  # of what is free: expected bytes leave out the answers that are decoded, and are of another prompt
_Item = TypeVar("_Item")


def in_room(items: Sequence[_Item], num_bytes: Callable[[_Item], int], arena: Arena) -> Iterator[list[_Item]]:
    """The items in runs, each of one or more, whose caches are expected to fit into free memory together."""
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
