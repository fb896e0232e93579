"""Circuit breaker: after consecutive failures calls are skipped for a pause, then one is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Breaker:
    """Closed: all calls pass. Open for `pause_s` after `num_failures` in a row: none. Half-open: one call may try."""

    def __init__(
        self, *, num_failures: int = 3, pause_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_failures = num_failures
        self.pause_s = pause_s
        self._clock = clock
        self._lock = Lock()
        self._failed = 0
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._retry_at is not None and self._clock() < self._retry_at

    def enter(self) -> bool:
        """Whether to call now; the caller then reports with `succeeded` or `failed`."""
        with self._lock:
            if self._retry_at is None:
                return True
            if self._clock() < self._retry_at:
                return False
            self._retry_at = self._clock() + self.pause_s  # half-open: others wait for this call's result
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._retry_at = 0, None

    def failed(self) -> None:
        with self._lock:
            self._failed += 1
            if self._failed >= self.num_failures:
                self._retry_at = self._clock() + self.pause_s
