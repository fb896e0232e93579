"""Yield points: cooperative scheduling inside a forward pass, so that a chunked prefill can pause between layers.

A computation that may be interrupted calls `yield_point()` between its parts. Nothing happens unless its thread has a
`switch`, which may run other work before it returns, or raise to end the computation. Changes to the model go through
`patched`, and its lock is `held`; a switch runs other work `unpatched`, so that it finds the model unchanged and free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

Act = Callable[[], object]
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
    """Let other work run now, if this thread has a switch; `may_end=False`: the computation must not be ended here."""
    if _here.switch is not None:
        _here.switch(may_end)


@contextmanager
def yields_to(switch: Switch) -> Iterator[None]:
    """Call `switch` at every yield point of this thread while the context lasts."""
    before, _here.switch = _here.switch, switch
    try:
        yield
    finally:
        _here.switch = before


@contextmanager
def patched(apply: Act, undo: Act) -> Iterator[None]:
    """A change that lasts as long as the context, except while the thread is `unpatched`."""
    _here.patches.append(_Patch(apply, undo))
    try:
        apply()
        yield
    finally:
        _here.patches.pop()
        _to_its_end(undo)


def _to_its_end(act: Act) -> None:
    """What Ctrl-C interrupts is done once more, or a model would stay changed; then the interrupt goes on."""
    try:
        act()
    except KeyboardInterrupt:
        _to_its_end(act)
        raise


@contextmanager
def held(lock: RLock) -> Iterator[None]:
    """The lock, except while the thread is `unpatched`: work that runs meanwhile may need what it guards."""
    with lock:
        _here.patches.append(_Patch(lock.acquire, lock.release))
        try:
            yield
        finally:
            _here.patches.pop()


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
