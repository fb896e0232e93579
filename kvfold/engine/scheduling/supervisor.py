"""Supervisor of the scheduler's thread: restarts a loop that raises, at most `MAX_RESTARTS` times a minute."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Literal

from kvfold.errors import Overloaded

MAX_RESTARTS = 5  # in a minute: a loop that raises more often will not recover
RESTART_DELAY_S = 0.2
_log = logging.getLogger("kvfold.engine")

State = Literal["running", "restarting", "failed", "closed"]


class Supervisor:
    """Runs `loop` in a thread until it returns. After an exception `fail_all` ends every job with it, since the job
    that caused it may be among them. `on_failure` is called in the thread after the last restart. `changed` guards the
    state and is notified when it is closed."""

    def __init__(
        self,
        loop: Callable[[], None],
        fail_all: Callable[[Exception], None],
        on_failure: Callable[[], None],
        changed: Condition,
    ) -> None:
        self.is_closed = False
        self.restarts: deque[float] = deque(maxlen=MAX_RESTARTS)  # times of the latest
        self._loop = loop
        self._fail_all = fail_all
        self._on_failure = on_failure
        self._changed = changed
        self._state: State = "running"
        self._thread = Thread(target=self._run, name="kvfold-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        if self.is_closed:
            return "closed"
        return self._state if self._thread.is_alive() else "failed"

    def require_open(self) -> None:
        """Overloaded if no job can be taken any more."""
        if self.is_closed:
            raise Overloaded("the server is shutting down; send the request to another one")
        if self._state == "failed":
            raise Overloaded("the server has failed and is about to end; send the request to another one")

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the loop end and wait for the thread, at most so long; returns whether it has ended."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._state != "failed":
            try:
                self._loop()
                return
            except BaseException as error:
                _log.critical("the scheduler's loop raised; every request fails", exc_info=True)
                self._recover(error)

    def _recover(self, error: BaseException) -> None:
        now = time.monotonic()
        is_hopeless = len(self.restarts) == MAX_RESTARTS and now - self.restarts[0] < 60
        self.restarts.append(now)
        with self._changed:
            self._state = "failed" if is_hopeless else "restarting"
        self._fail_all(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if is_hopeless:
            _log.critical("the scheduler's loop raised more than %d times in a minute; it is over", MAX_RESTARTS)
            self._on_failure()
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, RESTART_DELAY_S)
            self._state = "running"
