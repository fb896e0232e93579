"""Yield points: where a long computation lets others have the model, from however deep inside of it.

A computation that may be interrupted calls `yield_point()` between its parts. Nothing happens unless the thread that
runs it was given a `switch`, which may run others before it returns, or raise to end the computation there. What a
computation has changed in the model meanwhile, it changed through `patched`, and a switch runs others `unpatched`: they
find the model as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Act = Callable[[], None]
Switch = Callable[[bool], None]  # whether it may raise


class _Patch(NamedTuple):
    apply: Act
    undo: Act


class _Here(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.switch: Switch | None = None
        self.patches: list[_Patch] = []


_here = _Here()


def yield_point(*, may_end: bool = True) -> None:
    """Others may run now, if this thread lets them; not `may_end`: what has begun must be brought to its end."""
    if _here.switch is not None:
        _here.switch(may_end)


@contextmanager
def yields_to(switch: Switch) -> Iterator[None]:
    """Call `switch` at every yield point that this thread comes to while the context lasts."""
    before, _here.switch = _here.switch, switch
    try:
        yield
    finally:
        _here.switch = before


@contextmanager
def patched(apply: Act, undo: Act) -> Iterator[None]:
    """A change that lasts as long as the context, but for the time that the thread is `unpatched`."""
    _here.patches.append(_Patch(apply, undo))
    try:
        apply()
        yield
    finally:
        _here.patches.pop()
        undo()


@contextmanager
def unpatched() -> Iterator[None]:
    """Without the changes of this thread."""
    for patch in reversed(_here.patches):
        patch.undo()
    try:
        yield
    finally:
        for patch in _here.patches:
            patch.apply()
