"""A computation that takes turns with its caller: like a generator, but it may yield from however deep inside.

It runs on a thread of its own, for the stack of a model's forward cannot be put aside otherwise. Of the two threads one
runs while the other waits, always, so what only one may touch (model, arena) needs no lock.

    caller:    resume() ......waits...... -> False   decode steps   resume() .... -> True
    its own:            layers, layers, is_due()                             layers, end
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from kvfold.yielding import unpatched, yields_to

T = TypeVar("T")


class Abandoned(BaseException):
    """Raised at a yield point of a computation that nobody will resume; it undoes what it has done, and ends."""


class Resumable(Generic[T]):
    """`work` pauses at yield points (kvfold/yielding.py) at which `is_due` says so. Call all of it from one thread."""

    def __init__(self, work: Callable[[], T], is_due: Callable[[], bool]) -> None:
        self._work = work
        self._is_due = is_due
        self._turn, self._callers_turn = Semaphore(0), Semaphore(0)
        self._is_abandoned = False
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="kvfold-resumable", daemon=True)

    def resume(self) -> bool:
        """Go on until a pause is due, or to the end: then it is True. What the work raises is raised here."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._callers_turn.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            self._thread.join()
            try:
                raise error
            finally:
                del error  # or this frame, which it remembers, would keep it
        return bool(self._found)

    @property
    def result(self) -> T:
        """Of work that has come to its end."""
        return self._found[0]

    def abandon(self) -> None:
        """End it where it pauses, or soon after; what it does to undo itself is done when this returns."""
        self._is_abandoned = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with yields_to(self._pause):
                self._found.append(self._work())
        except BaseException as error:  # it is the caller's to handle
            self._error = error
        self._callers_turn.release()

    def _pause(self, may_end: bool) -> None:
        if not self._is_abandoned and self._is_due():
            with unpatched():
                self._callers_turn.release()
                self._turn.acquire()
        if self._is_abandoned and may_end:
            raise Abandoned
