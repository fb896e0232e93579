"""Background work queue: one thread, bounded in bytes; jobs that do not fit are dropped, never waited for."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from kvfold.errors import KvfoldWarning

Job = Callable[[], None]


class BackgroundQueue:
    """Runs jobs in FIFO order; the thread starts with the first job and ends with `close`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._jobs: deque[tuple[int, Job]] = deque()
        self._pending_bytes = 0  # queued and running
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def submit(self, num_bytes: int, job: Job) -> bool:
        """False if the queue is full (an empty queue takes a job of any size) or closed."""
        with self._changed:
            full = self._pending_bytes > 0 and self._pending_bytes + num_bytes > self.limit_bytes
            if full or self._is_closed:
                return False
            self._jobs.append((num_bytes, job))
            self._pending_bytes += max(1, num_bytes)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="kvfold-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def close(self) -> None:
        """Run queued jobs, then end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                num_bytes, job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # the thread has to go on
                warnings.warn(f"background work of the store failed: {error!r}", KvfoldWarning, stacklevel=1)
            finally:
                with self._changed:
                    self._pending_bytes -= max(1, num_bytes)
                    self._changed.notify_all()
