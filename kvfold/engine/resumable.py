"""A resumable computation (a coroutine on a thread): pauses a prefill between layers and resumes it later.

It runs on its own thread, since the call stack of a model's forward cannot be suspended otherwise. Exactly one of the
two threads runs at any time, so model and arena need no lock.

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
    """Raised at a yield point of an abandoned computation, which undoes its changes and ends."""


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
        """Run until a pause is due (False) or to the end (True); an exception of the work is raised here."""
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
                del error  # or its traceback, which holds this frame, would keep it alive
        return bool(self._found)

    @property
    def result(self) -> T:
        """Of work that has ended."""
        return self._found[0]

    def abandon(self) -> None:
        """End it at its yield point; its changes are undone when this returns."""
        self._is_abandoned = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with yields_to(self._pause):
                self._found.append(self._work())
        except BaseException as error:  # raised again in resume
            self._error = error
        self._callers_turn.release()

    def _pause(self, may_end: bool) -> None:
        if not self._is_abandoned and self._is_due():
            with unpatched():
                self._callers_turn.release()
                self._turn.acquire()
        if self._is_abandoned and may_end:
            raise Abandoned
